"""`engine admin`: inspects and changes a running server."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.console import output
from engine.cli.help import VerbGroup
from engine.cli.ops.admin_client import call_admin
from engine.cli.ops.keys import (
    AdminOption,
    ConcurrentOption,
    ModelsOption,
    NameArgument,
    QueuedOption,
    QueuedTokensOption,
    RequestsOption,
    TenantOption,
    TokensOption,
    keys_table,
)
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType


def call(
    ctx: typer.Context, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Call the admin API of the server that the options of `engine admin` name."""
    return call_admin(ctx.obj["url"], ctx.obj["key_file"], method, path, body)


def show(ctx: typer.Context, found: Mapping[str, Any], view: "RenderableType") -> None:
    if ctx.obj["as_json"]:
        print(json.dumps(found, indent=2))
    elif isinstance(view, str):
        print(view)
    else:
        output().print(view)


def pairs_table(pairs: Mapping[str, Any]) -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for name, value in pairs.items():
        table.add_row(name.replace("_", " "), "-" if value is None else str(value))
    return table


class HoistingGroup(VerbGroup):
    """Accepts the options of `engine admin` after a subcommand too: `admin models --url URL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        front: list[str] = []
        rest: list[str] = []
        waiting = iter(args)
        for each in waiting:
            if each in ("--url", "--admin-key-file"):
                front += [each, *itertools.islice(waiting, 1)]
            elif each == "--json" or each.startswith(("--url=", "--admin-key-file=")):
                front.append(each)
            else:
                rest.append(each)
        return super().parse_args(ctx, front + rest)


app = typer.Typer(
    cls=HoistingGroup,
    help="Look at and change a running server: models, caches, limits, keys.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
keys_app = typer.Typer(
    cls=VerbGroup, help="Keys of the running server.", no_args_is_help=True, rich_markup_mode=None
)
cache_app = typer.Typer(
    cls=VerbGroup, help="Its prefix caches.", no_args_is_help=True, rich_markup_mode=None
)
plugins_app = typer.Typer(
    cls=VerbGroup, help="Its plugins.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(keys_app, name="keys")
app.add_typer(cache_app, name="cache")
app.add_typer(plugins_app, name="plugins")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="A model that `models` lists.")]
WaitOption = Annotated[
    float | None,
    typer.Option("--wait", help="Seconds that running requests get; default: the drain time-out."),
]


@app.callback()
def options(
    ctx: typer.Context,
    url: Annotated[
        str, typer.Option(help="The server, with or without /v1.")
    ] = "http://127.0.0.1:8080",
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with the key; or set LLM_ENGINE_ADMIN_KEY.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer.")] = False,
) -> None:
    ctx.obj = {"url": url, "key_file": admin_key_file, "as_json": as_json}


@app.command()
def status(ctx: typer.Context) -> None:
    """Show the server's state."""
    found = call(ctx, "GET", "status")
    limits = ", ".join(f"{name} {value}" for name, value in found["limits"].items() if value)
    in_use = ", ".join(f"{each['key'] or 'anyone'} {each['in_flight']}" for each in found["in_use"])
    shown = found | {"limits": limits or "none", "in_use": in_use or "none"}
    show(ctx, found, pairs_table(shown))


@app.command()
def models(ctx: typer.Context) -> None:
    """List the server's models, loaded or not."""
    from rich.table import Table

    found = call(ctx, "GET", "models")
    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = ("id", "state", "backend", "in_flight", "memory_mb", "idle_s")
    for column in columns:
        table.add_column(column.replace("_", " "))
    for each in found["models"]:
        row = ["-" if each.get(column) is None else str(each[column]) for column in columns]
        row[0] += " (default)" if each["default"] else ""
        table.add_row(*row)
    show(ctx, found, table)


@app.command()
def load(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name that it knows, or a path.")],
    id: Annotated[str | None, typer.Option("--id", help="What clients call it.")] = None,
    backend: Annotated[str | None, typer.Option("--backend", help="What runs it.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Of that backend.")
    ] = None,
) -> None:
    """Load a model: a new one, or one that was unloaded."""
    from engine.cli.serve import parse_options

    body = {"model": model, "id": id, "backend": backend, "options": parse_options(option)}
    found = call(ctx, "POST", "models/load", {k: v for k, v in body.items() if v is not None})
    show(ctx, found, f"{found['id']} is loaded.")


@app.command()
def unload(ctx: typer.Context, id: IdArgument, wait: WaitOption = None) -> None:
    """Free a model's memory; the next request for it loads it again."""
    found = call(ctx, "POST", "models/unload", _named(id, wait))
    show(ctx, found, f"{id} is unloaded." if found["was_loaded"] else f"{id} was not loaded.")


@app.command()
def swap(
    ctx: typer.Context,
    id: IdArgument,
    model: Annotated[str | None, typer.Option(help="New model; default: the same.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="NAME=VALUE",
            help="Option of the new engine, such as kv_dtype=int8; can be repeated.",
        ),
    ] = None,
) -> None:
    """Replace a model's engine by a new one, and lose no request.

    The new engine starts beside the old one, so memory must have room for both.
    """
    from engine.cli.serve import parse_options

    body = {"id": id, "model": model, "options": parse_options(option)}
    found = call(ctx, "POST", "models/swap", {k: v for k, v in body.items() if v is not None})
    told = f"{found['moved']} requests moved, {found['finishing']} finish in the old engine."
    show(ctx, found, f"{id} runs in a new engine. {told}")


@app.command("rm")
def remove(ctx: typer.Context, id: IdArgument, wait: WaitOption = None) -> None:
    """Remove a model, so that clients can't request it."""
    found = call(ctx, "POST", "models/remove", _named(id, wait))
    show(ctx, found, f"{id} is gone.")


@cache_app.command("flush")
def flush(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="[ID]", help="Of this model only.")] = None,
) -> None:
    """Drop the cached prefixes that no running request uses."""
    found = call(ctx, "POST", "cache/flush", {} if model is None else {"model": model})
    show(ctx, found, "\n".join(found["done"]) or "There is nothing loaded.")


@cache_app.command("warm")
def warm(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Prompts, one on each line.")],
    model: Annotated[str | None, typer.Option(help="Default: the first model.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Default: every tenant with a key.")] = None,
) -> None:
    """Prefill prompts now, so that requests with the same prefix start faster later."""
    body = {"prompts": read_prompt_lines(file), "model": model, "tenant": tenant}
    found = call(ctx, "POST", "cache/warm", {k: v for k, v in body.items() if v is not None})
    show(ctx, found, pairs_table(found))


@app.command("log-level")
def log_level(
    ctx: typer.Context,
    level: Annotated[str, typer.Argument(help="debug, info, warning or error.")],
) -> None:
    """Change the log level of the server and its engine processes."""
    found = call(ctx, "POST", "log-level", {"level": level})
    untold = "".join(f"\nNot told: {each}" for each in found.get("untold", ()))
    show(ctx, found, f"It logs {level} now.{untold}")


@app.command()
def limits(
    ctx: typer.Context,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    max_concurrent: ConcurrentOption = None,
    max_queued: QueuedOption = None,
    max_queued_tokens: QueuedTokensOption = None,
    key: Annotated[str | None, typer.Option(help="Of this key; default: of all others.")] = None,
) -> None:
    """Change the limits of keys; 0 removes a limit. Limits of one key are saved in its file."""
    given = _limits(
        requests_per_minute, tokens_per_minute, max_concurrent, max_queued, max_queued_tokens
    )
    found = call(ctx, "POST", "limits" if key is None else f"keys/{key}/limits", given)
    shown = found["limits"] if key is None else found
    show(ctx, found, pairs_table(shown))


@keys_app.command("list")
def list_keys(ctx: typer.Context) -> None:
    """List the keys by name."""
    found = call(ctx, "GET", "keys")
    show(ctx, found, keys_table(found["keys"]))


@keys_app.command("new")
def new_key(
    ctx: typer.Context,
    name: NameArgument,
    tenant: TenantOption = None,
    admin: AdminOption = False,
    model: ModelsOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    max_concurrent: ConcurrentOption = None,
    max_queued: QueuedOption = None,
    max_queued_tokens: QueuedTokensOption = None,
) -> None:
    """Create a key and print it; it is accepted at once, and can't be shown again."""
    body: dict[str, Any] = {"name": name, "role": "admin" if admin else "user"}
    body |= {} if tenant is None else {"tenant": tenant}
    body |= {} if model is None else {"models": model}
    body |= _limits(
        requests_per_minute, tokens_per_minute, max_concurrent, max_queued, max_queued_tokens
    )
    found = call(ctx, "POST", "keys", body)
    show(ctx, found, found["key"])


@keys_app.command("rm")
def remove_key(ctx: typer.Context, name: NameArgument) -> None:
    """Remove a key; it is refused from now on."""
    show(ctx, call(ctx, "DELETE", f"keys/{name}"), f"'{name}' is refused from now on.")


@plugins_app.command("list")
def list_plugins(ctx: typer.Context) -> None:
    """List the plugins in use, and their state."""
    from rich.table import Table

    found = call(ctx, "GET", "plugins")
    table = Table(box=None, header_style="bold")
    columns = ("name", "version", "state", "on_failure", "failures", "last_failure")
    for column in columns:
        table.add_column(column.replace("_", " "))
    for each in found["plugins"]:
        values = (each[column] for column in columns)
        table.add_row(*("-" if value is None else str(value) for value in values))
    show(ctx, found, table if found["plugins"] else "No plugin is in use.")


@plugins_app.command("enable")
def enable_plugin(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="One that `list` shows.")],
) -> None:
    """Enable a plugin again that was disabled after failures."""
    found = call(ctx, "POST", f"plugins/{name}/enable", {})
    show(ctx, found, f"{found['name']} is {found['state']}.")


@app.command()
def drain(ctx: typer.Context) -> None:
    """Accept no new requests; running ones continue."""
    found = call(ctx, "POST", "drain", {})
    show(ctx, found, f"It takes no new requests; {found['in_flight']} are running.")


@app.command()
def undrain(ctx: typer.Context) -> None:
    """Accept requests again."""
    show(ctx, call(ctx, "POST", "undrain", {}), "It takes requests again.")


@app.command()
def reload(ctx: typer.Context) -> None:
    """Read keys, limits and the log level again, as SIGHUP does."""
    found = call(ctx, "POST", "reload", {})
    show(ctx, found, pairs_table(found))


@app.command()
def audit(ctx: typer.Context) -> None:
    """Show the latest changes, newest first."""
    from rich.table import Table

    found = call(ctx, "GET", "audit")
    table = Table(box=None, header_style="bold")
    table.add_column("when", no_wrap=True)
    for column in ("who", "what", "target", "result"):
        table.add_column(column, overflow="fold")
    for each in found["changes"]:
        table.add_row(each["ts"][:19], each["who"], each["action"], each["target"], each["result"])
    show(ctx, found, table)


def _named(id: str, wait: float | None) -> dict[str, Any]:
    return {"id": id} if wait is None else {"id": id, "wait_s": wait}


def _limits(*values: int | None) -> dict[str, int | None]:
    from engine.core.key_file import LIMIT_NAMES

    given = zip(LIMIT_NAMES, values, strict=True)
    return {name: value or None for name, value in given if value is not None}


def read_prompt_lines(path: Path) -> list[Any]:
    """Parse a file of prompts in the same way as the server, without importing the server. Each
    line is one prompt: a JSON string, a JSON object or plain text.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from None
    prompts: list[Any] = []
    for line in filter(str.strip, lines):
        try:
            value = json.loads(line)
        except ValueError:
            value = line
        prompts.append(value if isinstance(value, str | dict) else line)
    if not prompts:
        raise ConfigError(f"{path} has no prompts.")
    return prompts
