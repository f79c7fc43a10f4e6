"""The messages between the main process and an HTTP worker. A request has a number, which its
worker chose.
"""

import msgspec

Header = tuple[bytes, bytes]


class Setup(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """Main to worker, once: how to serve connections."""

    log_level: str
    log_format: str
    tls: tuple[str, str] | None  # the files of the certificate and of its key


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Worker to main, once: connections can be passed."""


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Worker to main, twice a second: a sign of life, and the number of its connections."""

    num_connections: int


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """Worker to main: it has taken this many of the connections that were passed to it."""

    count: int


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """Worker to main: a request's head. `body` is the whole body, or None if more of it is to come.
    The other fields are those of an ASGI scope.
    """

    number: int
    body: bytes | None
    method: str
    scheme: str
    http_version: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: list[Header]
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """Main to worker: the application waits for the next part of a request's body."""

    number: int


class Part(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """Worker to main: a part of a request's body."""

    number: int
    body: bytes
    is_last: bool


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Worker to main: the client has disconnected."""

    number: int


class Blocked(msgspec.Struct, frozen=True, array_like=True, tag="blocked"):
    """Worker to main: the client reads its answer too slowly."""

    number: int


class Drained(msgspec.Struct, frozen=True, array_like=True, tag="drained"):
    """Worker to main: the client has read all that was written."""

    number: int


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Main to worker: the head of an answer."""

    number: int
    status: int
    headers: list[Header]


class Chunks(msgspec.Struct, frozen=True, array_like=True, tag="chunks"):
    """Main to worker: parts of the bodies of answers, each with the request's number."""

    chunks: list[tuple[int, bytes]]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """Main to worker: nothing follows. If not `is_whole`, the answer broke off."""

    number: int
    is_whole: bool


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Main to worker: close all connections, and exit."""


ToWorker = Setup | Want | Start | Chunks | Ended | Close
FromWorker = Hello | Load | Taken | Opened | Part | Gone | Blocked | Drained
