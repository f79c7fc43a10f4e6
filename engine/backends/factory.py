"""Makes a backend from its kind, its model and named options, as configuration files have them.

Each kind has a configuration class, a subclass of `BackendConfig`. An option is a field of this
class. Options that the class has no field for go into its field `backend_args`.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import msgspec

from engine.backends.base import BackendConfig, InferenceBackend
from engine.core.errors import ConfigError
from engine.core.registry.backend_registry import backend_class

# Default port of backends that run as child servers. 0 means any free port.
ANY_PORT = 0


def make_backend(
    kind: str, model: str, options: Mapping[str, Any] = MappingProxyType({})
) -> InferenceBackend:
    """Make a backend without starting it. For an invalid option, raises a `ConfigError` that names
    it.
    """
    made = backend_class(kind)
    backend: InferenceBackend = made(make_config(made.config_type, kind, model, options))
    return backend


def option_value(text: str) -> Any:
    """Parse a command-line value: as TOML if possible, else as text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def make_config(
    config_type: type[BackendConfig], kind: str, model: str, options: Mapping[str, Any]
) -> BackendConfig:
    known = [field.name for field in dataclasses.fields(config_type) if field.name != "model_name"]
    for name in options:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
            raise ConfigError(
                f"backend '{kind}' has no option '{name}'; {hint}"
                " Options that only its engine knows go into backend_args.",
                param=name,
            )
    fields = {"port": ANY_PORT} | dict(options) | {"model_name": model}
    try:
        return msgspec.convert(fields, config_type)
    except msgspec.ValidationError as error:
        raise ConfigError(f"backend '{kind}': {error}") from None
