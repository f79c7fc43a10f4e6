"""Parses the command line words that say which backends to compare, with their models and options.

A word is a name from the configuration's `[backends]`, a kind (`native`) or an address
(`http://...`). A kind or an address may have a name before it (`exact=native`,
`cloud=https://...`). An option is `name.option=value`; further dots address nested tables:
`native.backend_args.threads=1`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.backends.factory import option_value
from engine.core.errors import ConfigError
from engine.core.registry.backend_registry import backend_names

URL_KIND = "openai"
_SCHEMES = ("http://", "https://", "unix://")


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    kind: str
    model: str
    options: Mapping[str, Any]


def find_contenders(
    words: Sequence[str],
    options: Sequence[str],
    model: str,
    configured: Mapping[str, Contender],
) -> list[Contender]:
    """The backends to compare, in the order of `words`. Raises `ConfigError` if a word or option is
    invalid.

    Backends without a model of their own use `model`. For a server at an address, the default is
    the first model that it lists.
    """
    found = [_contender(word.strip(), model, configured) for word in words if word.strip()]
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"'{name}' is named twice in --backends; tell them apart: a={name},b={name}"
            )
    given = [_option(text, names) for text in options]
    return [_with_options(each, [o for o in given if o[0] == each.name]) for each in found]


def _contender(word: str, model: str, configured: Mapping[str, Contender]) -> Contender:
    if word in configured:
        return configured[word]
    if word.startswith(_SCHEMES):
        return Contender(word, URL_KIND, "auto", {"base_url": word})
    name, is_named, target = word.partition("=")
    if is_named and target.startswith(_SCHEMES):
        return Contender(name, URL_KIND, "auto", {"base_url": target})
    kind = target if is_named else name
    if kind not in backend_names():
        named = f", or of [backends]: {', '.join(configured)}" if configured else ""
        raise ConfigError(
            f"--backends: there is no '{kind}'; kinds are {', '.join(backend_names())}{named};"
            " an address begins with http://",
            param="backends",
        )
    return Contender(name, kind, model, {})


def _option(text: str, names: Sequence[str]) -> tuple[str, list[str], Any]:
    """Parse an option into the backend's name, the path of the option, and its value."""
    path, is_assigned, value = text.partition("=")
    # A backend's name may be an address, which contains dots. So take the longest name that
    # matches.
    owners = [name for name in names if path.startswith(f"{name}.")]
    if not is_assigned or not owners:
        raise ConfigError(
            f"--option {text}: write NAME.OPTION=VALUE, NAME being one of {', '.join(names)}",
            param="option",
        )
    owner = max(owners, key=len)
    keys = path.removeprefix(f"{owner}.").split(".")
    return owner, keys, option_value(value)


def _with_options(contender: Contender, given: Sequence[tuple[str, list[str], Any]]) -> Contender:
    options = dict(contender.options)
    for owner, keys, value in given:
        table = options
        for key in keys[:-1]:
            inner = table.get(key, {})
            if not isinstance(inner, Mapping):
                raise ConfigError(f"--option {owner}.{'.'.join(keys)}: '{key}' is no table")
            table[key] = dict(inner)
            table = table[key]
        table[keys[-1]] = value
    model = options.pop("model", contender.model)
    return Contender(contender.name, contender.kind, str(model), options)
