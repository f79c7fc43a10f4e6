"""Loads the compiled module of kernels, and refuses one that does not fit this Python code."""

from importlib import import_module
from typing import Any

from engine.core.errors import ConfigError

KERNELS = "engine.native._native"
# A digest of the C++ files that define what Python passes to the module (CMakeLists.txt lists
# them). Kernels that were built from other files would read arguments and memory wrongly.
# `tests/unit/native/test_native_interface.py` says when this must change.
INTERFACE = "8b7142a6e70d95c1"


def kernels() -> Any:
    """The compiled module of kernels. If it was not built, or from other sources, raises a
    `ConfigError` that says how to get it.
    """
    try:
        module = import_module(KERNELS)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the native kernels were not built, for lack of a C++ compiler; install one "
            "(for example: apt-get install g++) and install the engine again, or serve with "
            "PyTorch: pip install 'engine[torch]' and --backend torch"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"the native kernels can't be loaded: {error}; install the engine again on this "
            "machine, or use --backend torch"
        ) from error
    # Modules of earlier versions have no such attribute.
    if getattr(module, "INTERFACE", None) != INTERFACE:
        raise ConfigError(
            f"the native kernels in {module.__file__} were built from another version of the "
            "engine's sources; build them again: pip install --editable . in the source folder, "
            "or pip install --force-reinstall engine"
        )
    return module
