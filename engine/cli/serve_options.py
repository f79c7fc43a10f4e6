"""The flags of `engine serve`. Those that set one setting each follow from the schema of the
settings (`core/config_schema.py`); other commands share some of them. The others are defined here.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from engine.cli.console import (
    ApiKeyFileOption,
    BackendOption,
    DeviceOption,
    DtypeOption,
    complete_model,
)
from engine.core.config import flag_name
from engine.core.config_presets import ParametersTable
from engine.core.config_schema import setting_fields, setting_flags

# The heading in the help, by the section of the settings.
_HEADINGS = {
    "server": "Server",
    "model": "Model",
    "cache": "Memory and speed",
    "performance": "Memory and speed",
    "nodes": "Memory and speed",
    "logging": "Logs",
    "metrics": "Logs",
    "storage": "Server",
}
# Flags of settings that other commands have as well.
_SHARED: dict[str, Any] = {
    "server.api_key_file": ApiKeyFileOption,
    "model.backend": BackendOption,
    "model.device": DeviceOption,
    "model.dtype": DtypeOption,
}
SERVE_FLAGS = tuple(key for key in setting_fields() if key in setting_flags() or key in _SHARED)
# Names of flags that set the preset of the served model: its template, and the sampling parameters
# of requests that set none. A parameter that is not listed has a flag of its own name.
_PRESET_NAMES = {
    "template": "--chat-template --chat-template-file",
    "temperature": "--temperature --temp",
    "repetition_penalty": "--repetition-penalty --repeat-penalty",
    "seed": "--seed -s",
    "max_tokens": "--max-tokens --n-predict --predict -n",
}
_PRESET_HELP = {
    "template": "Chat template: a file, text, or a built-in name such as chatml.",
    "max_tokens": "Of requests that set none; -1: no limit.",
}
PRESET_PREFIX = "presets."
PRESET_FLAGS = tuple(PRESET_PREFIX + name for name in ("template", *ParametersTable.model_fields))
# The flags that concern the engine. A node has a name of its own.
ENGINE_FLAGS = tuple(
    key
    for key in SERVE_FLAGS
    if not key.startswith(("server.", "storage.", "metrics.")) and key != "model.name"
)

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        "--model-path",
        rich_help_panel="Model",
        help="The model: a name, a file, a folder or ORG/REPO[:QUANT].",
        autocompletion=complete_model,
    ),
]
HubOption = Annotated[
    str | None,
    typer.Option(
        "--hf-repo",
        "-hf",
        "-hfr",
        metavar="ORG/REPO[:QUANT]",
        rich_help_panel="Model",
        help="MODEL from the hub.",
    ),
]
OptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        rich_help_panel="Model",
        help="Option of a backend other than our own, such as python=/opt/vllm/bin/python;"
        " can be repeated.",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        "--lora-modules",
        metavar="NAME=PATH",
        rich_help_panel="Model",
        help="LoRA adapter that clients call NAME: a PEFT folder, a GGUF file, or an address"
        " (hf:ORG/REPO); can be repeated.",
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        rich_help_panel="Server",
        help="The API key. Other users of this machine can see it; prefer --api-key-file.",
    ),
]


def with_flags(keys: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of these settings. Its parameter `flags` gets their values as a
    dict, by the names of the settings. The value of a flag that is not given is None.
    """
    names = {flag_name(key).removeprefix("--").replace("-", "_"): key for key in keys}
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(key)
        )
        for name, key in names.items()
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_added(**given: Any) -> None:
            flags = {key: given.pop(name) for name, key in names.items()}
            command(**given, flags=flags)

        own = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, each in inspect.signature(command).parameters.items()
            if name != "flags"
        ]
        with_added.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        with_added.__annotations__ = {each.name: each.annotation for each in (*own, *added)}
        return with_added

    return decorate


def _option(key: str) -> Any:
    """The type and the `typer.Option` of a setting's flag."""
    if key in _SHARED:
        return _SHARED[key]
    if key.startswith(PRESET_PREFIX):
        return _preset_option(key.removeprefix(PRESET_PREFIX))
    flag = setting_flags()[key]
    option = typer.Option(
        *(flag.names.split() or [flag_name(key)]),
        metavar=flag.metavar,
        rich_help_panel=flag.heading or _HEADINGS[key.partition(".")[0]],
        help=flag.help,
        autocompletion=complete_model if flag.is_model else None,
    )
    return Annotated[_plain(setting_fields()[key].annotation) | None, option]


def _preset_option(name: str) -> Any:
    """The type and the `typer.Option` of a flag that sets a field of the model's preset."""
    field = ParametersTable.model_fields.get(name)
    names = _PRESET_NAMES.get(name) or flag_name(PRESET_PREFIX + name)
    text = _PRESET_HELP.get(name, "Of requests that set none.")
    option = typer.Option(*names.split(), rich_help_panel="Answers", help=text)
    return Annotated[(str if field is None else _plain(field.annotation)) | None, option]


def _plain(annotation: Any) -> Any:
    """The type of a flag's value. The settings check what the parser of flags can't."""
    kinds = [each for each in get_args(annotation) if each is not type(None)] or [annotation]
    kind = get_args(kinds[0])[0] if hasattr(kinds[0], "__metadata__") else kinds[0]
    return kind if len(kinds) == 1 and kind in (bool, int, float, Path) else str
