"""Opens the connection of a node to a server: HTTP, proofs of the token, and then frames.

The first request has no proof. The server refuses it with a random number, and forgets it. The
second request proves that the node has the token, by an HMAC over that number and one of its own.
The answer 101 has the server's proof, and another random number, for the HMACs of the frames.
"""

import asyncio
import os
import secrets
import ssl
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from engine.core.errors import (
    AuthenticationError,
    ConfigError,
    ConflictError,
    EngineError,
    UnavailableError,
)
from engine.core.shards.link import Seal, is_same, proof_of, seals_of
from engine.ipc.connection import Connection
from engine.routing.nodes.proofs import proof_for
from engine.routing.nodes.wire import (
    BUILD_HEADER,
    CONNECT_PATH,
    HELLO_TIMEOUT_S,
    NONCE_HEADER,
    PROOF_HEADER,
    UPGRADE,
    node_build,
)

MIN_TOKEN_LENGTH = 16
MAX_HEAD_BYTES = 16 * 1024
MAX_ANSWER_BYTES = 2 * MAX_HEAD_BYTES
SWITCHED = b"HTTP/1.1 101 "


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that nodes can join."""

    url: str
    host: str
    port: int
    path: str
    token: str
    tls: ssl.SSLContext | None = None


def endpoint_of(url: str, token: str, ca_file: Path | None = None) -> Endpoint:
    """Parse the address of a server. `ca_file` has the certificates that sign the server's."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url} is no address: write it as http://HOST:PORT or https://HOST:PORT")
    tls = None
    if parts.scheme == "https":
        try:
            tls = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ca-file {ca_file}: {error}") from None
    port = parts.port or (443 if tls is not None else 80)
    root = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(url, parts.hostname, port, root + CONNECT_PATH, token, tls)


def read_token(path: Path) -> str:
    """Read the token that nodes and servers share. Other users must not be able to read it."""
    path = path.expanduser()
    try:
        status = path.stat()
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain ASCII"
        raise ConfigError(f"the token file {path} can't be read: {reason}") from None
    if status.st_uid != os.geteuid() and os.geteuid() != 0:
        raise ConfigError(f"the token file {path} belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"other users can read the token file {path}; chmod 600 it")
    if len(token) < MIN_TOKEN_LENGTH or any(each.isspace() for each in token):
        raise ConfigError(
            f"the token in {path} is shorter than {MIN_TOKEN_LENGTH} characters or has spaces;"
            " `engine node token FILE` makes a good one"
        )
    return token


def takes_no_nodes(url: str) -> UnavailableError:
    return UnavailableError(
        f"{url} takes no nodes: start it with LLM_ENGINE_SERVER__NODE_TOKEN_FILE, or with"
        " server.node_token_file in engine.toml."
    )


class _Handshake(asyncio.Protocol):
    """Waits for the head of an HTTP response, and for the body of a refusal."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > MAX_ANSWER_BYTES and not self.answer.done():
            self.answer.set_result(self._data)
        if self._is_whole and not self.answer.done():
            self.answer.set_result(self._data)

    @property
    def _is_whole(self) -> bool:
        """A refusal without a length ends with the connection."""
        head, ended, body = self._data.partition(b"\r\n\r\n")
        if head.startswith(SWITCHED):
            return self._data.endswith(b"\r\n\r\n") or len(self._data) > MAX_HEAD_BYTES
        length = _header(head, "content-length")
        return bool(ended) and length.isdecimal() and len(body) >= int(length[:9])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_result(self._data)


async def dial(endpoint: Endpoint, connection: Connection[Any]) -> None:
    """Connect to a server and let `connection` handle what it sends. Raises `AuthenticationError`
    if the token is wrong, and `ConflictError` if the server is another build.
    """
    transport, seals = await _open(endpoint)
    connection.trust(*seals)
    transport.set_protocol(connection)
    connection.connection_made(transport)


async def check(endpoint: Endpoint) -> None:
    """Raise the error of a server that would never take this node, whatever its model is. A server
    that does not answer may do so later.
    """
    with suppress(OSError, UnavailableError):
        (await _open(endpoint))[0].abort()


async def authorization(endpoint: Endpoint, what: str) -> str:
    """Proves the token for one HTTP request, without sending it. `what` is its method and path."""
    async with asyncio.timeout(HELLO_TIMEOUT_S):
        challenge = await _challenge(endpoint)
    return proof_for(endpoint.token.encode(), what, challenge, secrets.token_hex(16))


async def _challenge(endpoint: Endpoint) -> str:
    transport, answer = await _ask(endpoint, "")
    transport.abort()
    found = _header(answer, NONCE_HEADER)
    if not found:
        raise _refusal(answer, endpoint)
    return found


async def _open(endpoint: Endpoint) -> tuple[asyncio.Transport, tuple[Seal, Seal]]:
    token = endpoint.token.encode()
    async with asyncio.timeout(HELLO_TIMEOUT_S):
        challenge, ours = await _challenge(endpoint), secrets.token_hex(16)
        sent = proof_for(token, "join", challenge, ours)
        transport, answer = await _ask(endpoint, f"authorization: {sent}\r\n")
        try:
            if not answer.startswith(SWITCHED):
                raise _refusal(answer, endpoint)
            theirs = _header(answer, NONCE_HEADER)
            if not is_same(_header(answer, PROOF_HEADER), proof_of(token, "lead", ours, theirs)):
                raise _wrong_token(endpoint)
        except BaseException:
            transport.abort()
            raise
    return transport, seals_of(token, theirs, ours, is_lead=False)


async def _ask(endpoint: Endpoint, authorization: str) -> tuple[asyncio.Transport, bytes]:
    """Ask a server to switch to frames. Returns the head of its answer, or its whole refusal."""
    transport, handshake = await _connect(endpoint)
    try:
        transport.write(
            f"GET {endpoint.path} HTTP/1.1\r\nhost: {endpoint.host}:{endpoint.port}\r\n"
            f"connection: Upgrade\r\nupgrade: {UPGRADE}\r\n{authorization}"
            f"{BUILD_HEADER}: {node_build()}\r\n\r\n".encode()
        )
        return transport, await handshake.answer
    except BaseException:
        transport.abort()
        raise


def _header(answer: bytes, name: str) -> str:
    """A header of an answer. Empty if it has none."""
    for line in answer.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]:
        found, _, value = line.decode("ascii", "replace").partition(":")
        if found.strip().lower() == name:
            return value.strip()
    return ""


async def _connect(endpoint: Endpoint) -> tuple[asyncio.Transport, _Handshake]:
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_connection(
            _Handshake, endpoint.host, endpoint.port, ssl=endpoint.tls
        )
    except ssl.SSLCertVerificationError as error:
        raise AuthenticationError(
            f"{endpoint.url}: the certificate is not trusted ({error.verify_message}); name the"
            " file of its signer with --ca-file."
        ) from None
    except ssl.SSLError as error:
        raise UnavailableError(
            f"{endpoint.url} does not speak TLS as it should ({error.reason}); is it http://?"
        ) from None


def _wrong_token(endpoint: Endpoint) -> AuthenticationError:
    return AuthenticationError(
        f"{endpoint.url} refused the node: the token is not the server's (server.node_token)."
    )


def _refusal(answer: bytes, endpoint: Endpoint) -> EngineError:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12].decode("ascii", "replace")
    if status == "401":
        return _wrong_token(endpoint)
    if status == "404":
        return takes_no_nodes(endpoint.url)
    if not status:
        hint = "" if endpoint.tls is not None else " If it speaks TLS, write https://."
        return UnavailableError(f"{endpoint.url} closed the connection.{hint}")
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = "is it a server of this kind?"
    if status == "409":
        return ConflictError(f"{endpoint.url} refused the node: {message}")
    return UnavailableError(f"{endpoint.url} answered with {status}: {message}")
