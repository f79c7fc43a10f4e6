"""Writes parts of a response body without a coroutine.

uvicorn's `send` is a coroutine, and the stream that calls it is a task. Resuming both for each
token takes longer than making the token's text. If the connection takes more data at once, a stream
may write to it directly, from the callback in which the tokens arrived.
"""

import weakref
from collections.abc import MutableMapping
from typing import Any, Protocol, TypeVar

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "engine.direct_body"


class DirectBody(Protocol):
    """The body of one response. The response must have been started with `send`, and must be ended
    with it.
    """

    def write(self, body: bytes) -> bool:
        """Write a part of the body. Returns False, and writes nothing, if the connection can't take
        it now.
        """
        ...


class CycleBody:
    """The body of a response on a connection of this process."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        # The cycle has the scope, and the scope has this object. With a weak reference, all of them
        # are freed with the request, and not by the garbage collector.
        self._cycle = weakref.ref(cycle)
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def is_paused(self) -> bool:
        """Whether the client reads too slowly."""
        return self._flow.write_paused

    @property
    def has_whole_request(self) -> bool:
        """Whether the whole body of the request has arrived."""
        cycle = self._cycle()
        return cycle is not None and not cycle.more_body

    def write(self, body: bytes) -> bool:
        cycle = self._cycle()
        if cycle is None or cycle.disconnected or not cycle.chunked_encoding:
            return False
        if self._flow.write_paused:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(body), body))
        return True


Scope = TypeVar("Scope", bound=MutableMapping[str, Any])


def with_direct_body(scope: Scope, body: DirectBody) -> Scope:
    """Let the application find the body of a request's response."""
    scope["extensions"] = {_EXTENSION: body}
    return scope


def direct_body(scope: MutableMapping[str, Any]) -> Any:
    """The body of the request's response, or None if it can't be written directly."""
    return scope.get("extensions", {}).get(_EXTENSION)
