"""Functions that several commands use: output, common options, and loading of settings.

Results go to standard output, so that they can be piped. Everything else goes to standard error.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.core.errors import ConfigError, EngineError, InvalidRequestError
from engine.core.registry.backend_registry import BUILTIN_BACKENDS

if TYPE_CHECKING:
    from rich.console import Console

    from engine.core.config import LoadedSettings

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="PATH",
        help="TOML file with settings. Default: $LLM_ENGINE_CONFIG, else ./engine.toml if there.",
    ),
]


def complete_model(incomplete: str) -> list[str]:
    """Names of models that begin with `incomplete`, for tab completion: those on this machine
    first.
    """
    from engine.core.store.catalogue import CATALOGUE
    from engine.core.store.model_store import ModelStore

    names = dict.fromkeys([*ModelStore().models(), *CATALOGUE])
    return [name for name in names if name.startswith(incomplete)]


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A name that `engine list` shows, a file, a folder or ORG/REPO[:QUANT] of the hub.",
        autocompletion=complete_model,
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        rich_help_panel="Model",
        help=f"What runs the model: auto, {', '.join(BUILTIN_BACKENDS)}.",
        autocompletion=lambda incomplete: [
            name for name in ("auto", *BUILTIN_BACKENDS) if name.startswith(incomplete)
        ],
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", rich_help_panel="Model", help="auto, cpu, cuda or cuda:1."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", rich_help_panel="Model", help="auto, float32, bfloat16 or float16."),
]
ApiKeyFileOption = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel="Server", help="File with the API key; or set LLM_ENGINE_API_KEY."
    ),
]
# Of commands whose first argument is the address.
SERVER_URL = "http://127.0.0.1:8080"
UrlArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[URL]", help=f"The server, with or without /v1. [default: {SERVER_URL}]"
    ),
]
SameUrlOption = Annotated[str | None, typer.Option("--url", help="The same as URL.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def output() -> "Console":
    """A console for results, on standard output."""
    from rich.console import Console

    return Console()


def messages() -> "Console":
    """A console for progress and notes, on standard error."""
    from rich.console import Console

    return Console(stderr=True)


def print_error(error: EngineError) -> None:
    """Print the error as one line, with a red label on a terminal. Unprintable characters are
    replaced by spaces, because the text may come from a file or a server.
    """
    text = "".join(each if each.isprintable() else " " for each in str(error))
    label = "error:"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        label = f"\x1b[31m{label}\x1b[0m"
    print(label, text, file=sys.stderr)


def exit_code(error: EngineError) -> int:
    """The exit status for an error: 2 if the user can fix it on the command line or in the
    settings, else 1.
    """
    return 2 if isinstance(error, ConfigError | InvalidRequestError) else 1


def read_api_key(path: Path | None) -> str | None:
    """The API key for a server that the user gave by URL. It is read from the file, or from the
    variable LLM_ENGINE_API_KEY if no file is given.

    The key is never taken from the settings. A key in ./engine.toml is only for the user's own
    server, and must not be sent to another one.
    """
    if path is None:
        return os.environ.get("LLM_ENGINE_API_KEY")
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}.", param="api_key_file") from None


def load_cli_settings(
    config: Path | None, flags: Mapping[str, Any] | None = None
) -> "LoadedSettings":
    """Load the settings from the configuration file, the environment variables and the flags.
    `flags` maps `section.key` to a value, or to None if the flag was not given.
    """
    from engine.core.config import load_settings

    given = {key: value for key, value in (flags or {}).items() if value is not None}
    return load_settings(config, given, os.environ)


def own_server() -> tuple[str, str | None]:
    """The address of the server that the settings of this machine describe, and its API key."""
    from engine.core.config import is_loopback

    server = load_cli_settings(None).settings.server
    host = server.host if is_loopback(server.host) else "127.0.0.1"
    key = server.api_key.get_secret_value() if server.api_key else None
    return f"http://{host}:{server.port}", key
