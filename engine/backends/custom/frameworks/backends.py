"""The frameworks' backends by class. A frontend holds one of these and loads no framework; an
engine's process loads its framework's `engine` module and nothing of the frontend.
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
    """A model on tinygrad, on a CPU by way of clang, or on a GPU that tinygrad knows."""

    framework = "tinygrad"
