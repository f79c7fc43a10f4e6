"""The backend classes of all frameworks. A frontend uses these and loads no framework; an engine
process loads its framework's `execution/build.py` and nothing of the frontend.
"""

from engine.backends.custom.base_custom import CustomBackend


class NativeBackend(CustomBackend):
    """A model on our own kernels, on the CPU."""

    framework = "native"


class TorchBackend(CustomBackend):
    """A model on PyTorch, on a CPU or a CUDA device."""

    framework = "torch"


class JAXBackend(CustomBackend):
    """A model on JAX, on a CPU or on one or several CUDA devices."""

    framework = "jax"


class TinygradBackend(CustomBackend):
    """A model on tinygrad: on a CPU through clang, or on a GPU that tinygrad supports."""

    framework = "tinygrad"
