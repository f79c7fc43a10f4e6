"""Entry points of a framework: the functions of its `execution/build.py`, loaded on demand.

find_device(device, dtype) -> DeviceInfo                        where a model would run
memory_needs(source, options, device) -> MemoryNeeds            weights, keys and values
build_runner(source, config) -> ModelRunner                     weights loaded, cache allocated
profiler(runner, source, config) -> Profiler                    for `engine profile`
build_encoder(source, device, dtype, num_threads) -> Encoder    only if it runs text encoders
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from engine.core.errors import ConfigError


def framework_entry(name: str) -> Any:
    """Loads the framework's library. Raises a `ConfigError` that names what to install."""
    if name != "native" and find_spec(name) is None:
        raise ConfigError(f"--backend {name} needs a package: pip install 'engine[{name}]'")
    return import_module(f"{__package__}.{name}.execution.build")
