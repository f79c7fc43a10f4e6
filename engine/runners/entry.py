"""Imports a framework on demand. The framework's `execution/build.py` defines these functions:

find_device(device, dtype) -> DeviceInfo                        resolves "auto", checks the device
memory_needs(source, options, device) -> MemoryNeeds            bytes of weights, keys and values
build_runner(source, config) -> ModelRunner                     loads weights, allocates the cache
profiler(runner, source, config) -> Profiler                    measures a runner's kernels
build_encoder(source, options, device) -> Encoder               if the framework runs text encoders
build_image_encoder(source, config) -> ImageEncoder             if the framework reads images
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from engine.core.errors import ConfigError


def framework_entry(name: str) -> Any:
    """Imports the framework's `execution/build.py`, and with it the framework's library.

    If the library is missing, raises a `ConfigError` that says what to install.
    """
    if name != "native" and find_spec(name) is None:
        raise ConfigError(f"--backend {name} needs a package: pip install 'engine[{name}]'")
    return import_module(f"engine.{name}.execution.build")
