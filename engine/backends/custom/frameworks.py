"""The backend classes of all frameworks. The frontend uses these classes and imports no tensor
library. The engine process imports the framework's `execution/build.py` instead.

Each class is also found beside its framework, by two names: `engine.jax` has JAXBackend, and so has
`engine.backends.custom.frameworks.jax`.
"""

from pathlib import Path

from engine.backends.custom.base_custom import CustomBackend

__path__ = [str(Path(__file__).parents[2])]  # modules below this one are the frameworks' packages


class NativeBackend(CustomBackend):
    """Runs a model with our own C++ kernels, on the CPU."""

    framework = "native"


class TorchBackend(CustomBackend):
    """Runs a model with PyTorch, on a CPU or a CUDA device."""

    framework = "torch"


class JAXBackend(CustomBackend):
    """Runs a model with JAX, on a CPU or on one or several CUDA devices."""

    framework = "jax"


class TinygradBackend(CustomBackend):
    """Runs a model with tinygrad, on a CPU (needs clang) or on a GPU that tinygrad supports."""

    framework = "tinygrad"
