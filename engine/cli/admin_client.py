"""How `engine admin` talks to a server and shows what it said."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import typer

from engine.cli.console import output, read_api_key
from engine.core.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    UnavailableError,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

ADMIN_VARIABLE = "LLM_ENGINE_ADMIN_KEY"
# Loading a model takes as long as it takes.
TIMEOUT_S = 900.0


def call(
    ctx: typer.Context, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the server answered. Raises an `EngineError` in its words, or about how to reach it."""
    import httpx

    given = ctx.obj
    url = _root(given["url"])
    key = _key(given["key_file"])
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        reply = httpx.request(
            method, f"{url}/v1/admin/{quote(path)}", json=body, headers=headers, timeout=TIMEOUT_S
        )
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise UnavailableError(
            f"Nothing answers at {url} ({reason}). Is the server running? Name it with --url."
        ) from None
    try:
        found = reply.json()
    except ValueError:
        found = {}
    if reply.status_code == 200 and isinstance(found, dict):
        return found
    raise _refusal(reply.status_code, found, url)


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


def _key(path: Path | None) -> str | None:
    if path is None and os.environ.get(ADMIN_VARIABLE):
        return os.environ[ADMIN_VARIABLE]
    return read_api_key(path) or None


def _root(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise InvalidRequestError(f"{url} is no address: begin it with http:// or https://.")
    return url.rstrip("/").removesuffix("/v1")


def _refusal(status: int, found: Any, url: str) -> Exception:
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str):
        return UnavailableError(f"{url} is no server of this kind: it answered with {status}.")
    if status == 401:
        return AuthenticationError(
            f"{message} Set {ADMIN_VARIABLE}, or name a file with --admin-key-file."
        )
    if status == 403:
        return ForbiddenError(message)
    return InvalidRequestError(message) if status < 500 else UnavailableError(message)
