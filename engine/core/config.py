"""Loads the settings from four sources: defaults, a TOML file, LLM_ENGINE_* variables and
command-line flags. A later source overrides an earlier one.

Each source except the defaults becomes a layer, which maps `section.key` to a value. With each
value, the layer keeps its origin: the file, the variable or the flag. Error messages and `engine
config show` name this origin. An unknown name is an error. The result depends only on the arguments
and on the files that they name.
"""

import ipaddress
import re
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from engine.core.config_schema import (
    ALIASES,
    NO_TABLES,
    SECRET_KEYS,
    SECTIONS,
    TABLES,
    NamedTables,
    ServerSettings,
    Settings,
    setting_flags,
    setting_keys,
)
from engine.core.errors import ConfigError
from engine.core.suggestions import suggest

ENV_PREFIX = "LLM_ENGINE_"
CONFIG_VARIABLE = "LLM_ENGINE_CONFIG"  # path of the TOML file
DEFAULT_CONFIG_FILE = Path("engine.toml")
MIN_KEY_LENGTH = 16

# Short environment variables for the most used settings. Every setting also has a variable with a
# systematic name, such as LLM_ENGINE_SERVER__PORT.
SHORT_VARIABLES = {
    "LLM_ENGINE_HOST": "server.host",
    "LLM_ENGINE_PORT": "server.port",
    "LLM_ENGINE_API_KEY": "server.api_key",
    "LLM_ENGINE_ADMIN_KEY": "server.admin_key",
    "LLM_ENGINE_MODEL_PATH": "model.model_path",
    "LLM_ENGINE_DEVICE": "model.device",
    "LLM_ENGINE_MAX_SEQUENCE_LENGTH": "model.max_sequence_length",
    "LLM_ENGINE_CACHE_ENABLED": "cache.enabled",
    "LLM_ENGINE_CACHE_SIZE_MB": "cache.max_size_mb",
    "LLM_ENGINE_LOG_LEVEL": "logging.level",
}

# Setting -> its command-line flag, for settings whose flags do not follow from the schema.
_FLAGS = {"model.model_path": "MODEL", "model.options": "--option", "model.adapters": "--lora"}


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The settings and their origins. `origins` maps each `section.key` to `default`, a file, a
    variable or a flag.
    """

    settings: Settings
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Value:
    value: Any
    origin: str


_Layer = dict[str, _Value]


def load_settings(
    config_path: Path | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> LoadedSettings:
    """Load and merge the settings of all sources. `overrides` has the command-line flags, as
    `section.key` -> value. `environ` has the environment variables. Raises `ConfigError` if a
    setting is invalid.
    """
    path = _find_config(config_path, environ)
    content = _read_toml(path) if path else {}
    tables = _named_tables(content, path)
    layers = [_from_toml(content, path)] if path else []
    layers += [_from_environ(environ), _from_flags(overrides)]
    merged: _Layer = {}
    for layer in layers:
        _read_secret_files(layer)
        merged |= layer
    sections: dict[str, dict[str, Any]] = {}
    for key, item in merged.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = item.value
    _choose_preset(sections, tables)
    try:
        settings = Settings.model_validate(sections | {"tables": tables})
    except ValidationError as error:
        raise ConfigError(_explain(error, merged)) from None
    origins = {key: merged[key].origin if key in merged else "default" for key in setting_keys()}
    origins |= dict.fromkeys(table_keys(tables), str(path))
    return LoadedSettings(settings, MappingProxyType(origins))


def _choose_preset(sections: dict[str, dict[str, Any]], tables: NamedTables) -> None:
    """If the model is the name of a preset that says what to load, load that under this name."""
    model = sections.setdefault("model", {})
    preset = tables.presets.get(model.get("model_path", ""))
    if preset is not None and preset.model is not None:
        model.setdefault("name", model["model_path"])
        model["model_path"] = preset.model


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(settings: Settings) -> None:
    """Raise `ConfigError` if other machines, or web pages of any origin, could use the server
    without an API key. `server.insecure_no_auth` allows that. If other machines can reach the
    server, keys that are too short are refused as well.
    """
    server = settings.server
    exposed = not is_loopback(server.host)
    if server.api_key is None and server.keys_file is None:
        if exposed and not server.insecure_no_auth:
            raise ConfigError(
                f"server.host is {server.host}, which other machines can reach, and there is no API"
                " key: set LLM_ENGINE_API_KEY, server.api_key_file or server.keys_file, bind"
                " 127.0.0.1, or pass --insecure-no-auth",
                param="server.api_key",
            )
        if "*" in server.allowed_origins and not server.insecure_no_auth:
            raise ConfigError(
                "server.enable_cors lets every web site call this server, and there is no API key:"
                " set LLM_ENGINE_API_KEY, or list the sites in server.cors_origins",
                param="server.cors_origins",
            )
    secrets = ("api_key", server.api_key), ("admin_key", server.admin_key)
    for name, secret in (*secrets, ("node_token", server.node_token)):
        if exposed and secret is not None and len(secret.get_secret_value()) < MIN_KEY_LENGTH:
            raise ConfigError(
                f"server.{name} is shorter than {MIN_KEY_LENGTH} characters, too short for a"
                " server that other machines can reach: `openssl rand -hex 24` makes a good one",
                param=f"server.{name}",
            )


def check_private(path: Path, key: str) -> None:
    """Raise `ConfigError` if other users can read a file that holds a secret."""
    if stat.S_IMODE(path.expanduser().stat().st_mode) & 0o077:
        raise ConfigError(f"{key}: other users can read {path}; chmod 600 it", param=key)


def _check_tls(server: ServerSettings) -> None:
    names = ("tls_cert_file", "tls_key_file")
    files = [getattr(server, name) for name in names]
    for name, path in zip(names, files, strict=True):
        if path is None and any(files):
            raise ConfigError(f"server.{name} is missing; HTTPS needs both files", param=name)
        if path is not None and not path.is_file():
            raise ConfigError(f"server.{name}: there is no file {path}", param=f"server.{name}")


def check_references(settings: Settings) -> None:
    """Raise `ConfigError` if a file, directory or plugin that the settings name can't be used. This
    is called before a model is loaded.
    """
    server, storage, warm_file = settings.server, settings.storage, settings.cache.warm_file
    if server.keys_file is not None:
        from engine.core.key_file import read_keys  # imported late: few servers have a keys file

        read_keys(server.keys_file)
    if server.node_token_file is not None:
        check_private(server.node_token_file, "server.node_token_file")
    _check_tls(server)
    if server.node_token is not None and server.frontends not in ("auto", 1):
        raise ConfigError(
            "server.frontends: nodes join over a connection of the main process, so a server with a"
            " node token has one frontend process; leave it out",
            param="server.frontends",
        )
    if storage.path is not None:
        _check_storage(storage.directory)
    if warm_file is not None and not warm_file.expanduser().is_file():
        raise ConfigError(f"cache.warm_file: there is no file {warm_file}", param="cache.warm_file")
    if settings.tables.plugins:
        from engine.core.registry.plugin_registry import plugin_class

        for name, table in settings.tables.plugins.items():
            if table.enabled:
                plugin_class(name)


def _check_storage(directory: Path) -> None:
    """Check at startup that the storage directory can be written. Otherwise the problem would only
    be noticed when a request stores something.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"storage.path: nothing can be kept in {directory}: {error.strerror}",
            param="storage.path",
        ) from None


def variable_names() -> dict[str, str]:
    """Environment variable -> the `section.key` that it sets, for all settings."""
    return SHORT_VARIABLES | {_variable(key): key for key in setting_keys()}


def _variable(key: str) -> str:
    return ENV_PREFIX + key.replace(".", "__").upper()


def flag_name(key: str) -> str:
    """The command-line flag of a setting, for example `--port` for `server.port`."""
    flag = setting_flags().get(key)
    if flag is not None and flag.names:
        return re.split("[ /]", flag.names, maxsplit=1)[0]
    return _FLAGS.get(key) or "--" + key.split(".")[1].replace("_", "-")


def _find_config(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    named = path or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    if named is not None:
        return named
    return DEFAULT_CONFIG_FILE if DEFAULT_CONFIG_FILE.is_file() else None


def table_keys(tables: NamedTables) -> list[str]:
    """The `section.name` of every named table, for example `backends.local`."""
    return [f"{section}.{name}" for section in TABLES for name in getattr(tables, section)]


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _named_tables(content: Mapping[str, Any], path: Path | None) -> NamedTables:
    if not any(section in content for section in TABLES):
        return NO_TABLES
    from engine.core.config_tables import read_tables  # imported late: most servers have no tables

    return read_tables(content, str(path))


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a file. The table `[cache.tiers]` is the section `tiers`."""
    cache = content.get("cache")
    if not isinstance(cache, dict) or "tiers" not in cache:
        return dict(content)
    others = {key: value for key, value in cache.items() if key != "tiers"}
    return {**content, "cache": others, "tiers": cache["tiers"]}


def _from_toml(content: Mapping[str, Any], path: Path) -> _Layer:
    layer: _Layer = {}
    known = [*SECTIONS, *TABLES]
    for section, table in _flat(content).items():
        if section in TABLES:
            continue
        if section not in known:
            raise ConfigError(f"{path}: unknown section [{section}]" + suggest(section, known))
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} must be a table, written [{section}]")
        for name, value in table.items():
            key = f"{section}.{name}"
            _check_known(key, f"{path}: unknown key {key}")
            if key in SECRET_KEYS:
                raise ConfigError(
                    f"{path}: {key} must not be in a configuration file;"
                    f" put it in a file of its own and name that in {key}_file",
                    param=key,
                )
            _add(layer, key, _Value(value, str(path)), f"{key} in {path}")
    return layer


def _from_environ(environ: Mapping[str, str]) -> _Layer:
    names = variable_names() | {_variable(old): key for old, key in ALIASES.items()}
    layer: _Layer = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        key = names.get(variable)
        if key is None:
            raise ConfigError(
                f"unknown environment variable {variable}" + suggest(variable, list(names))
            )
        if not environ[variable]:  # container tools pass unset variables as empty ones
            continue
        _add(layer, key, _Value(environ[variable], variable), variable)
    return layer


def _add(layer: _Layer, key: str, item: _Value, name: str) -> None:
    """Add a value, which its source calls `name`. `key` may be an earlier name of the setting."""
    key = ALIASES.get(key, key)
    if key in layer:
        raise ConfigError(f"{layer[key].origin} and {name} both set {key}: keep one of them")
    layer[key] = item


def _from_flags(overrides: Mapping[str, Any]) -> _Layer:
    layer: _Layer = {}
    for key, value in overrides.items():
        _check_known(key, f"unknown setting {key}")
        if key in SECRET_KEYS:
            raise ConfigError(
                f"{key} must not be on the command line, where other users can read it;"
                f" use an environment variable, or put it in a file and name that in {key}_file",
                param=key,
            )
        flag = flag_name(ALIASES.get(key, key))
        _add(layer, key, _Value(value, flag), flag)
    return layer


def _read_secret_files(layer: _Layer) -> None:
    """For each secret: if the layer has only the path of a file with the secret (`api_key_file`),
    read the secret from the file into the layer (`api_key`).
    """
    for key in SECRET_KEYS:
        named = layer.get(f"{key}_file")
        if named is None or key in layer:
            continue
        try:
            secret = Path(str(named.value)).expanduser().read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not plain ASCII"
            raise ConfigError(
                f"{key}_file ({named.origin}): cannot read {named.value}: {reason}",
                param=f"{key}_file",
            ) from None
        layer[key] = _Value(secret, f"{named.origin} ({key.split('.')[1]}_file)")


def _check_known(key: str, complaint: str) -> None:
    keys = setting_keys()
    if key not in keys and key not in ALIASES:
        raise ConfigError(complaint + suggest(key, keys))


def _explain(error: ValidationError, merged: _Layer) -> str:
    """Describe the first validation error in one line. pydantic's own message has several lines and
    shows secrets.
    """
    first, *others = error.errors(include_url=False, include_context=False)
    key = ".".join(str(part) for part in first["loc"][:2])
    reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    line = f"{key}: {reason}"
    item = merged.get(key)
    if item is not None:
        given = "" if key in SECRET_KEYS else f", got {str(item.value)[:80]!r}"
        line = f"{key} ({item.origin}): {reason}{given}"
    return line + (f" (and {len(others)} more)" if others else "")
