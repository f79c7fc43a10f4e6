"""A hostile request, and what comes back."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tests.scoreboard.hostile.values import RAW


@dataclass(frozen=True, slots=True)
class Hostile:
    """One request, and how it is sent."""

    seed: int
    route: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    content: bytes
    manner: str
    as_admin: bool
    body: dict[str, Any] | None  # None: the content is something else than the JSON of a body

    def without(self, fields: Iterable[str], least: dict[str, Any]) -> "Hostile":
        """The same request with the least values of these fields, or without them. A name with a
        dot is that of a field within an object.
        """
        assert self.body is not None
        body = dict(self.body)
        for outer, _, inner in (name.partition(".") for name in fields):
            if inner and isinstance(body[outer], dict) and inner in body[outer]:
                body[outer] = {key: value for key, value in body[outer].items() if key != inner}
                continue
            del body[outer]
            if outer in least:
                body[outer] = least[outer]
        return replace(self, body=body, content=encode(body).encode())

    def head(self, *extra: tuple[str, str]) -> bytes:
        lines = "".join(f"{name}: {value}\r\n" for name, value in (*self.headers, *extra))
        return f"{self.method} {self.target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1", "replace")


@dataclass
class Answer:
    """What came back. No status: the client left first, or the server closed the connection."""

    status: int = 0
    retry_after: str | None = None
    content_type: str = ""
    body: bytes = b""
    is_whole: bool = False
    has_left: bool = False
    seconds: float = 0.0


def encode(value: Any) -> str:
    """JSON, in which texts that begin with RAW are put without quotes."""
    encoded = json.dumps(value)
    return re.sub(rf'"{RAW}([^"]*)"', r"\1", encoded.replace(f'{RAW}\\"1\\"', "1"))
