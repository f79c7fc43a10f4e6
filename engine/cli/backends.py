"""`engine backends argv`: shows the command lines of external engines that run as child
processes.
"""

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.console import BackendOption, ConfigOption, ModelArgument, load_cli_settings
from engine.cli.help import VerbGroup
from engine.cli.serve import parse_options
from engine.cli.serve_options import OptionsOption

if TYPE_CHECKING:
    from engine.backends.base import InferenceBackend
    from engine.core.config_schema import Settings

NameOption = Annotated[
    str | None, typer.Option("--name", help="One of the file's [backends]; default: all of them.")
]

app = typer.Typer(cls=VerbGroup, add_completion=False, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Show the programs that backends run."""


@app.command()
def argv(
    model: ModelArgument = None,
    backend: BackendOption = None,
    option: OptionsOption = None,
    name: NameOption = None,
    config: ConfigOption = None,
) -> None:
    """Print the command that `engine serve` would start for each external engine."""
    from engine.backends.external.served_child import ServedBackend
    from engine.core.errors import ConfigError

    flags = {
        "model.model_path": model,
        "model.backend": backend,
        "model.options": parse_options(option),
    }
    settings = load_cli_settings(config, flags).settings
    found = 0
    for label, made in _backends(settings, name):
        if isinstance(made, ServedBackend):
            found += 1
            print(f"# {label}")
            print(shlex.join(made.argv()))
    if not found:
        raise ConfigError("none of these backends runs a program of its own; vllm and sglang do")


def _backends(settings: "Settings", wanted: str | None) -> "Iterator[tuple[str, InferenceBackend]]":
    """Yields each backend of the configuration file with its name; if `wanted` is given, only the
    backend with that name. If the file lists no backends, yields the backend that flags and the
    [model] section select.
    """
    from engine.backends.custom.engine_settings import backend_name
    from engine.backends.factory import make_backend
    from engine.core.errors import ConfigError

    tables = settings.tables.backends
    if wanted is not None and wanted not in tables:
        known = ", ".join(tables) or "none"
        raise ConfigError(f"there is no [backends.{wanted}]; there are: {known}", param="name")
    if not tables:
        kind = backend_name(settings)
        yield kind, make_backend(kind, settings.model.model_path, settings.model.options)
    for name, table in tables.items():
        if wanted in (None, name):
            yield name, make_backend(table.kind, table.model, table.options)
