"""Builds hostile requests. Each is decided by its seed, and by the ids that the server has given.

Most edits keep a request nearly valid, so that it gets deep into the server. Usually one field is
at a limit or beyond, and the others are sound.
"""

import gzip
import itertools
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from tests.scoreboard.hostile import grpc_calls
from tests.scoreboard.hostile.cases import Hostile, encode
from tests.scoreboard.hostile.fields import RESULTS, Known, draw_of, example
from tests.scoreboard.hostile.values import Schema, Values, text
from tests.scoreboard.http.bodies import least_bodies
from tests.support.files.dialect_examples import SAME

GRPC = "GRPC"  # stands for the method
NUM_FIELDS = (0, 1, 2, 3, 5, 8, 12, 16)
# Shares of the ways to send a request; the rest is sent plainly.
MANNERS = {
    "chunked": 0.04,
    "one byte at a time": 0.01,
    "cut": 0.03,
    "leave": 0.05,
    "pipelined": 0.02,
    "encoded": 0.05,
    "mistyped": 0.02,
    "repeated keys": 0.02,
    "another method": 0.03,
    "headers": 0.03,
    "truncated": 0.02,
}
# In these manners, the content is not the JSON of the body.
SPOILING = frozenset({"encoded", "mistyped", "repeated keys", "another method", "truncated"})
# Actions of an administrator that stop the service of others by design. A client asks for them.
WITHHELD = frozenset(
    {
        *("/v1/admin/drain", "/v1/admin/limits", "/v1/admin/keys/{name}/limits", "/sleep"),
        *("/v1/admin/keys/{name}", "/v1/admin/models/swap", "/v1/admin/models/remove"),
        *("/v1/admin/models/unload", "/v1/admin/log-level", "/v1/admin/models/load"),
        *("/api/delete", "/api/pull", "/api/create"),
    }
)
# Fields whose sound values say how much is computed; only hand-made values are drawn for them.
COSTLY = frozenset({"max_tokens", "max_new_tokens", "n_predict", "num_predict", "min_tokens"})
IMAGE_FIELDS = frozenset({"messages", "images", "input"})
PREFIXES = {
    "response_id": ("resp",),
    "conversation_id": ("conv",),
    "completion_id": ("chatcmpl",),
    "file_id": ("file",),
    "upload_id": ("upload",),
    "batch_id": ("batch", "msgbatch"),
    "job_id": ("ftjob",),
    "result_id": RESULTS,
    "request_id": ("req", "gen"),
    "item_id": ("msg",),
}


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    body: Schema | None  # None: it takes no JSON
    is_form: bool
    query: tuple[str, ...]
    fields: dict[str, Schema]

    @property
    def kind(self) -> str:
        """The kind of its body, which other routes may share."""
        return str((self.body or {}).get("$ref", self.path))

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


Pair = tuple[str, str, str]  # a kind of body, and two of its fields


def _pairs(route: Route, fields: Iterable[str]) -> Iterator[Pair]:
    for one, other in itertools.combinations(sorted(fields), 2):
        yield route.kind, one, other


def _weight(route: Route) -> float:
    """How often a route is used: the more fields it has, the more often."""
    return (1 + len(route.fields) / 4) * (3 if route.path == "/v1/interp/run" else 1)


def _grpc_route(target: str) -> Route:
    return Route(GRPC, target, None, False, (), {})


class Generator:
    """Draws hostile requests for all routes of an OpenAPI description."""

    def __init__(self, description: Schema, known: Known) -> None:
        self.known = known
        self._values = Values(description)
        self._bodies = least_bodies(known.model)
        self.routes = [*self._read_routes(description), *map(_grpc_route, grpc_calls.targets())]
        if known.sees:
            self.routes = [each for each in self.routes if IMAGE_FIELDS & each.fields.keys()]
        self._weights = [_weight(route) for route in self.routes]

    def _read_routes(self, description: Schema) -> Any:
        for path, operations in description["paths"].items():
            for method, operation in operations.items():
                content = operation.get("requestBody", {}).get("content", {})
                body = content.get("application/json", {}).get("schema")
                fields = self._values.properties(body) if body is not None else {}
                if {"temperature", "seed"} <= fields.keys():
                    fields = {name: {} for name in SAME} | fields  # names of other dialects
                is_form = "multipart/form-data" in content
                query = tuple(
                    each["name"]
                    for each in operation.get("parameters", ())
                    if each["in"] == "query"
                )
                yield Route(method.upper(), path, body, is_form, query, fields)

    def pairs(self) -> set[Pair]:
        """All pairs of fields that can meet in a body."""
        return {pair for route in self.routes for pair in _pairs(route, route.fields)}

    def met_by(self, seed: int) -> set[Pair]:
        """The pairs of fields of the request with this seed."""
        return set(_pairs(*self.outline(seed)))

    def outline(self, seed: int) -> tuple[Route, list[str]]:
        """The route and the fields of the request with this seed."""
        rng = random.Random(f"{seed}/outline")
        (route,) = rng.choices(self.routes, self._weights)
        count = min(rng.choice(NUM_FIELDS), len(route.fields))
        return route, rng.sample(sorted(route.fields), count)

    def request(self, seed: int) -> Hostile:
        route, fields = self.outline(seed)
        rng = random.Random(seed)
        if route.method == GRPC:
            content = grpc_calls.message(rng, route.path.rpartition("/")[2], self.known)
            return Hostile(seed, route.name, GRPC, route.path, (), content, "plain", False, None)
        manner = _manner(rng)
        body = None if route.body is None else self.body(rng, route, fields)
        content, kind = self._form(rng) if route.is_form else _content(rng, body, manner)
        method = route.method
        if manner == "another method":
            method = rng.choice(("HEAD", "OPTIONS", "PUT", "PATCH", "TRACE", "DELETE", "BREW"))
        headers = [("host", "localhost"), ("content-type", kind)]
        if manner == "encoded":
            content, encoding = _encoded(rng, content)
            headers += [("content-encoding", encoding)] if encoding else []
        if manner == "mistyped":
            kinds = ("text/plain", "application/json; charset=utf-7", "multipart/form-data", "x")
            headers[1] = ("content-type", rng.choice(kinds))
        if manner == "truncated":
            content = content[: rng.randrange(len(content) + 1)]
        if manner == "headers":
            headers += _odd_headers(rng)
        as_admin = route.path not in WITHHELD and rng.random() < 0.9
        target = self._target(rng, route)
        as_admin &= _is_for_admin(route.path)
        if manner in SPOILING:
            body = None
        fixed = (seed, route.name, method, target, tuple(headers), content, manner)
        return Hostile(*fixed, as_admin, body)

    def least(self, hostile: Hostile) -> dict[str, Any]:
        """The least body of a request's route."""
        return self._bodies.get(hostile.route.partition(" ")[2], {})

    def _target(self, rng: random.Random, route: Route) -> str:
        def replaced(found: re.Match[str]) -> str:
            name = found[1]
            if name in ("deployment", "model_id") or (name == "name" and "/v2/" in route.path):
                return _quoted(self.known.model if rng.random() < 0.9 else text(rng))
            return _quoted(self.known.one(rng, *PREFIXES.get(name, ("absent",))))

        target = re.sub(r"\{(\w+)\}", replaced, route.path) or "/"
        if route.query and rng.random() < 0.6:
            pairs = [f"{name}={self._query(rng)}" for name in route.query if rng.random() < 0.5]
            target += "?" + "&".join(pairs)
        elif rng.random() < 0.02:
            target += "?" + _quoted(text(rng) * rng.choice((1, 100)))
        return target

    def _query(self, rng: random.Random) -> str:
        values = ("1", "0", "-1", "100", "101", "true", "false", "asc", "desc", str(2**64), "1e400")
        return rng.choice((*values, _quoted(text(rng))))

    def body(self, rng: random.Random, route: Route, fields: list[str]) -> dict[str, Any]:
        """The least body of a route with these fields. One of the fields is hostile, often."""
        least = dict(self._bodies.get(route.path, {}))
        for name in least:
            draw = draw_of(route.path, name)
            if draw is not None and rng.random() < 0.5:
                least[name] = draw(rng, self.known)
        victim = rng.choice(fields) if fields and rng.random() < 0.6 else None
        for name in fields:
            schema = route.fields[name]
            if name == victim:
                least[name] = self._hostile(rng, name, schema)
            else:
                least[name] = self._sound(rng, route, name, schema)
        if rng.random() < 0.01:
            least[text(rng)] = self._values.junk(rng)
        return least

    def _sound(self, rng: random.Random, route: Route, name: str, schema: Schema) -> Any:
        draw = draw_of(route.path, name)
        told = example(rng, name)
        if draw is not None and (told is None or rng.random() < 0.5):
            return draw(rng, self.known)
        if told is not None and (not schema or rng.random() < 0.5):
            return told
        return self._values.sound(rng, schema)

    def _hostile(self, rng: random.Random, name: str, schema: Schema) -> Any:
        if name in COSTLY and rng.random() < 0.8:
            return rng.choice((0, 1, -1, 2**24 + 1, 2**31, None, "1", 1.5))
        return self._values.edge(rng, schema) if rng.random() < 0.7 else self._values.junk(rng)

    def _form(self, rng: random.Random) -> tuple[bytes, str]:
        """A form of an upload, with odd parts."""
        boundary = rng.choice(("b", "b", "b" * 70, "b" * 300))
        files = (
            self._lines(rng),
            b"",
            b"\0" * 1_000,
            b"{" * 9_999,
            text(rng).encode("utf-16", "surrogatepass"),
        )
        parts = [
            ("purpose", rng.choice(("batch", "batch", "fine-tune", "user_data", text(rng))), None),
            ("file", files[0] if rng.random() < 0.6 else rng.choice(files), "a.jsonl"),
            ("data", rng.choice(files), "a"),
        ]
        if rng.random() < 0.2:
            parts *= rng.choice((2, 50, 1_100))
        if rng.random() < 0.2:
            parts = rng.sample(parts, rng.randrange(len(parts)))
        content = b"".join(_form_part(rng, boundary, *part) for part in parts)
        if rng.random() < 0.9:
            content += f"--{boundary}--\r\n".encode()
        return content, f"multipart/form-data; boundary={boundary}"

    def _lines(self, rng: random.Random) -> bytes:
        """A file for a batch, or for training."""
        chat = {"messages": [{"role": "user", "content": "a"}]}
        (asked,) = (route for route in self.routes if route.path == "/v1/completions")
        fields = rng.sample(sorted(asked.fields), 3)
        lines = [
            {
                "custom_id": rng.choice(("a", str(number), text(rng))),
                "method": "POST",
                "url": rng.choice(("/v1/completions", "/v1/completions", "/v1/admin/drain")),
                "body": self.body(rng, asked, fields),
            }
            if rng.random() < 0.7
            else {"messages": [*chat["messages"], {"role": "assistant", "content": text(rng)}]}
            for number in range(rng.choice((1, 2, 5)))
        ]
        return "\n".join(encode(line) for line in lines).encode("utf-8", "surrogatepass")


def _is_for_admin(path: str) -> bool:
    """Whether only an administrator may use the path."""
    administers = ("/v1/admin/", "/v1/load_lora", "/v1/unload_lora", "/flush_cache", "/api/copy")
    return path.startswith((*administers, "/reset_prefix_cache", "/wake_up", "/start_", "/stop_"))


def _quoted(part: str) -> str:
    return quote(part.encode("utf-8", "surrogatepass"), safe="")


def _manner(rng: random.Random) -> str:
    drawn = rng.random()
    for name, share in MANNERS.items():
        drawn -= share
        if drawn < 0:
            return name
    return "plain"


def _content(rng: random.Random, body: dict[str, Any] | None, manner: str) -> tuple[bytes, str]:
    if body is None:
        return (b"" if rng.random() < 0.9 else b"{}"), "application/json"
    if manner == "repeated keys" and body:
        doubled = ", ".join(encode({name: body[name]})[1:-1] for name in [*body, *body])
        return ("{" + doubled + "}").encode(), "application/json"
    return encode(body).encode(), "application/json"


def _encoded(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """The content in another encoding, and what the header says about it."""
    match rng.randrange(7):
        case 0:
            return gzip.compress(content), "gzip"
        case 1:
            return gzip.compress(bytes(2**22)), "gzip"
        case 2:
            return content, rng.choice(("gzip", "br", "identity", text(rng)))
        case 3:
            return b"\xef\xbb\xbf" + content, ""
        case 4:
            return content.decode("utf-8", "replace").encode("utf-16"), ""
        case 5:
            return content.replace(b"hello", b"\xe9\xff"), ""
    return content + rng.choice((b"\0", b"{}", b"\n" * 10_000)), ""


def _odd_headers(rng: random.Random) -> list[tuple[str, str]]:
    plain = text(rng).replace("\r", "").replace("\n", "").replace("\0", "")
    return rng.choice(
        (
            [(f"x-{number}", "a") for number in range(rng.choice((50, 200)))],
            [("x-long", "a" * rng.choice((5_000, 100_000)))],
            [("x-request-id", plain * 10)],
            [("expect", "100-continue")],
            [("upgrade", "websocket"), ("connection", "upgrade")],
            [("traceparent", plain), ("tracestate", "a=" + "b" * 600)],
            [("inference-header-content-length", rng.choice(("0", "5", "-1", "9" * 30, "x")))],
            [("range", "bytes=0-"), ("if-none-match", "*"), ("accept", plain)],
            [("content-length", "0"), ("transfer-encoding", "chunked")],
        )
    )


def _form_part(
    rng: random.Random, boundary: str, name: str, value: str | bytes, filename: str | None
) -> bytes:
    said = f'form-data; name="{name}"'
    if filename is not None:
        odd = ("../../x", "a" * 3_000, 'a"b', text(rng).replace("\r\n", ""))
        said += f'; filename="{filename if rng.random() < 0.8 else rng.choice(odd)}"'
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    head = f"--{boundary}\r\nContent-Disposition: {said}\r\n\r\n"
    return head.encode("utf-8", "surrogatepass") + data + b"\r\n"
