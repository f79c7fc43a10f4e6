"""Calls the admin API of a running server, and turns its refusals into errors."""

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engine.cli.console import read_api_key
from engine.core.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    UnavailableError,
)

ADMIN_VARIABLE = "LLM_ENGINE_ADMIN_KEY"
# Time limit of a call. It is long, because loading a large model may take many minutes.
TIMEOUT_S = 900.0


def call_admin(
    url: str, key_file: Path | None, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Call the server's admin API and return its JSON response. If the server answers with an
    error, raises that error. If the server can't be reached, raises an error that tells the user
    what to check.
    """
    key = _key(key_file)
    authorization = None if key is None else f"Bearer {key}"
    return call_with(url, authorization, method, path, body, hint=" Name it with --url.")


def call_with(
    url: str,
    authorization: str | None,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    ca_file: Path | None = None,
    hint: str = "",
) -> dict[str, Any]:
    """Like `call_admin`, with an authorization that was already made. `ca_file` has the
    certificates that sign the server's. `hint` ends the message if nothing answers.
    """
    import httpx

    url = _root(url)
    headers = {} if authorization is None else {"authorization": authorization}
    verify = True if ca_file is None else ssl.create_default_context(cafile=str(ca_file))
    try:
        reply = httpx.request(
            method,
            f"{url}/v1/admin/{quote(path)}",
            json=body,
            headers=headers,
            timeout=TIMEOUT_S,
            verify=verify,
        )
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise UnavailableError(
            f"Nothing answers at {url} ({reason}). Is the server running?{hint}"
        ) from None
    try:
        found = reply.json()
    except ValueError:
        found = {}
    if reply.status_code == 200 and isinstance(found, dict):
        return found
    raise _refusal(reply.status_code, found, url)


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
