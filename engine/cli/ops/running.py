"""`engine ps` and `engine stop`: the models of a running server."""

from pathlib import Path
from typing import Annotated, Any

import typer

from engine.cli.console import JsonOption, messages, output, own_server
from engine.cli.ops.admin_client import call_admin
from engine.core.errors import InvalidRequestError

UrlOption = Annotated[
    str | None, typer.Option(help="The server. Default: the one that the settings describe.")
]
KeyOption = Annotated[
    Path | None,
    typer.Option("--admin-key-file", help="File with the key; or set LLM_ENGINE_ADMIN_KEY."),
]


def ps(
    url: UrlOption = None, admin_key_file: KeyOption = None, as_json: JsonOption = False
) -> None:
    """List the models of a running server, with their memory and requests."""
    found = _models(url, admin_key_file)
    if as_json:
        import json

        print(json.dumps(found, indent=2))
        return
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("model", "state", "backend", "memory", "requests", "idle"):
        table.add_column(column)
    for each in found:
        memory, idle = each.get("memory_mb"), each.get("idle_s")
        table.add_row(
            each["id"],
            each["state"],
            each.get("backend") or "-",
            "-" if memory is None else f"{memory} MB",
            str(each.get("in_flight", 0)),
            "-" if idle is None else f"{idle:.0f} s",
        )
    output().print(table)


def stop(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A model of `engine ps`. Not needed if it has one."),
    ] = None,
    url: UrlOption = None,
    admin_key_file: KeyOption = None,
) -> None:
    """Unload a model of a running server and free its memory. The next request loads it again."""
    loaded = [each["id"] for each in _models(url, admin_key_file)]
    if model is None:
        if len(loaded) != 1:
            raise InvalidRequestError(f"name a model to stop: {', '.join(loaded) or 'none'}")
        model = loaded[0]
    address = url or own_server()[0]
    done = call_admin(address, admin_key_file, "POST", "models/unload", {"id": model})
    text = f"{model} is unloaded." if done["was_loaded"] else f"{model} was not loaded."
    messages().print(text, markup=False, highlight=False)


def _models(url: str | None, key_file: Path | None) -> list[dict[str, Any]]:
    found = call_admin(url or own_server()[0], key_file, "GET", "models")
    models: list[dict[str, Any]] = found["models"]
    return models
