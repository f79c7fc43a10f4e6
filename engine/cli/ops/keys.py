"""`engine keys`: edits the keys file of a server on this machine. The server need not run.

A running server reads the file again on SIGHUP. `engine admin keys` changes the keys through the
running server instead.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.console import ConfigOption, JsonOption, load_cli_settings, messages, output
from engine.cli.help import VerbGroup
from engine.core.folders import data_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.table import Table

app = typer.Typer(
    cls=VerbGroup,
    help="The keys file of a server on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help="The keys file. Default: server.keys_file of the settings, or else keys.json in"
        " the data folder.",
    ),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="What the key is called.")]
TenantOption = Annotated[
    str | None,
    typer.Option(help="Whose it is; keys of a tenant share what is stored and cached."),
]
AdminOption = Annotated[
    bool, typer.Option("--admin", help="An administrator's key, for /v1/admin and engine admin.")
]
SpecialOption = Annotated[
    bool,
    typer.Option("--parse-special", help="Control tokens in the text of prompts take effect."),
]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model", metavar="MODEL", help="Model or LoRA adapter it may use; can be repeated."
    ),
]
RequestsOption = Annotated[int | None, typer.Option(help="Requests in a minute.")]
TokensOption = Annotated[int | None, typer.Option(help="Tokens in a minute.")]
ConcurrentOption = Annotated[int | None, typer.Option(help="Requests at once.")]
QueuedOption = Annotated[int | None, typer.Option(help="Requests without a first token.")]
QueuedTokensOption = Annotated[int | None, typer.Option(help="Tokens of such requests' prompts.")]


@app.command("new")
def new(
    name: NameArgument,
    tenant: TenantOption = None,
    admin: AdminOption = False,
    parse_special: SpecialOption = False,
    model: ModelsOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    max_concurrent: ConcurrentOption = None,
    max_queued: QueuedOption = None,
    max_queued_tokens: QueuedTokensOption = None,
    file: FileOption = None,
    config: ConfigOption = None,
) -> None:
    """Create a key and print it; it can't be shown again."""
    from engine.core.key_file import add_key

    path = _path(file, config)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "max_queued": max_queued,
        "max_queued_tokens": max_queued_tokens,
    }
    key, entry = add_key(
        path,
        name,
        tenant=tenant,
        role="admin" if admin else "user",
        parse_special=parse_special,
        models=model,
        limits=limits,
    )
    messages().print(
        f"{entry.role} key '{name}' of tenant '{entry.tenant_name}' is in {path}. A server that was"
        f" started with --keys-file {path} reads it on SIGHUP.",
        markup=False,
    )
    print(key)


@app.command("list")
def list_keys(
    file: FileOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """List the keys of the file by name."""
    from engine.core.key_file import read_keys

    shown = [key.public() for key in read_keys(_path(file, config))]
    if as_json:
        print(json.dumps(shown, indent=2))
    else:
        output().print(keys_table(shown))


@app.command("rm")
def remove(name: NameArgument, file: FileOption = None, config: ConfigOption = None) -> None:
    """Remove a key from the file."""
    from engine.core.key_file import remove_key

    path = _path(file, config)
    remove_key(path, name)
    messages().print(
        f"'{name}' is gone from {path}; a running server notices on SIGHUP.", markup=False
    )


def keys_table(keys: "Iterable[Mapping[str, Any]]") -> "Table":
    from rich.table import Table

    columns = ["name", "tenant", "role", "requests_per_minute", "tokens_per_minute"]
    columns += ["max_concurrent", "max_queued", "max_queued_tokens", "models", "created"]
    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column.replace("_per_minute", "/min").replace("_", " "))
    for key in keys:
        table.add_row(*(_cell(key.get(column)) for column in columns))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return "-" if value is None else str(value)


def _path(file: Path | None, config: Path | None) -> Path:
    if file is not None:
        return file.expanduser()
    path = load_cli_settings(config).settings.server.keys_file
    return (path or data_directory() / "keys.json").expanduser()
