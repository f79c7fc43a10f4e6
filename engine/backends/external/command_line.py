"""Converts typed options to another program's command line.

A single value is joined to its flag (`--flag=value`), so it can't be mistaken for a flag.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from engine.core.errors import ConfigError

_NAME = re.compile(r"[a-z0-9]+(?:[-_][a-z0-9]+)*")
# Any option that starts with this is refused. Programs accept abbreviated flags, so it covers all
# forms of --trust-remote-code.
_REMOTE_CODE = "trust"
# This option is refused too. It names a file with further options, which could include
# trust-remote-code.
_MORE_OPTIONS = "config"
# Options that must not be on a command line, because any user of this machine can read command
# lines.
_SECRETS = ("api-key", "hf-token", "admin-api-key")


def flag(name: str, value: Any) -> list[str]:
    """The words of one option. `max_len=5` becomes `--max-len=5`. True becomes `--max-len`, False
    becomes `--no-max-len`. Each item of a list becomes a word. A table becomes JSON.
    """
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    if isinstance(value, list | tuple):
        words = [str(each) for each in value]
        if any(word.startswith("-") for word in words):
            raise ConfigError(f"backend_args: no value of {name} may begin with '-'", param=name)
        return [f"--{dashed}", *words]
    text = json.dumps(value) if isinstance(value, Mapping) else str(value)
    return [f"--{dashed}={text}"]


def option_flags(config: Any, names: Iterable[str]) -> list[str]:
    """Flags for these fields of a configuration. A field is omitted if it is None, or if it is
    False and False is its default.
    """
    defaults = {each.name: each.default for each in dataclasses.fields(config)}
    found: list[str] = []
    for name in names:
        value = getattr(config, name)
        if value is not None and not (value is False and defaults[name] is False):
            found += flag(name, value)
    return found


def free_flags(options: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Flags for `backend_args`, the options that only the program knows. Options in `known` are
    refused, because they have their own configuration fields or we set them.
    """
    found: list[str] = []
    taken = {name.replace("_", "-") for name in known}
    for name, value in options.items():
        dashed = name.replace("_", "-").lower()
        if not _NAME.fullmatch(dashed):
            raise ConfigError(f"backend_args: {name!r} can't be the name of an option", param=name)
        if dashed.startswith(_REMOTE_CODE):
            raise ConfigError(
                "backend_args: code from a model's repository runs only where the option"
                " trust_remote_code is set to true",
                param=name,
            )
        if dashed == _MORE_OPTIONS:
            raise ConfigError(
                f"backend_args: the options in a {name} file can't be checked; name them here",
                param=name,
            )
        if any(dashed.startswith(secret) for secret in _SECRETS):
            raise ConfigError(
                f"backend_args: {name} would be readable by every user of this machine; use env",
                param=name,
            )
        if dashed in taken:
            raise ConfigError(f"backend_args: {name} is an option outside of it", param=name)
        if value is None:
            raise ConfigError(f"backend_args: {name} has no value", param=name)
        found += flag(dashed, value)
    return found
