"""Clients of a server under load: requests over raw sockets, with strictly checked answers.

`ask` sends one request and reads the answer to its end; the result is always a `Reply`. It is a
whole answer, a well-formed failure, or neither (`problem`).

    replies = await asyncio.gather(*(ask(served, completion(text, stream=True)) for text in texts))
    broken = [reply for reply in replies if not reply.is_well_formed]
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from engine_tools.conformance.sse import DONE, read_stream

ERROR_KEYS = {"message", "type", "param", "code"}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODEL = "smollm2-135m-instruct"
# Timeout of one request, from connecting to the end of its answer.
PATIENCE_S = 120.0


class HasAddress(Protocol):
    @property
    def address(self) -> tuple[str, int]: ...


class MalformedError(Exception):
    """An answer that is neither whole nor a well-formed failure."""


@dataclass
class Reply:
    """The result of one request. Times are of the monotonic clock."""

    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    status: int = 0  # 0: no response header arrived
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""  # without its transfer coding
    times: list[float] = field(default_factory=list)  # arrival time of each piece, without comments
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    scores: dict[int, list[float]] = field(default_factory=dict)  # logprobs of each choice's tokens
    error: dict[str, Any] | None = None  # a well-formed refusal, or a stream's final error event
    problem: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete, with one ending."""
        return self.problem is None and self.error is None

    @property
    def is_well_formed(self) -> bool:
        """Whether the answer is complete, or a well-formed error."""
        return self.problem is None

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def first_s(self) -> float:
        """Seconds until the first piece of the body."""
        return self.times[0] - self.began if self.times else float("inf")


def completion(prompt: str, **fields: Any) -> dict[str, Any]:
    """A body for `/v1/completions` with a deterministic answer of `max_tokens` tokens."""
    fixed = {"model": MODEL, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    return {"prompt": prompt} | fixed | fields


def request_bytes(
    path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> bytes:
    content = json.dumps(body).encode()
    lines = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Connection": "close",
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in (lines | dict(headers or {})).items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content


async def ask(
    server: HasAddress,
    body: Mapping[str, Any],
    path: str = COMPLETIONS,
    *,
    headers: Mapping[str, str] | None = None,
    patience_s: float = PATIENCE_S,
    reply: Reply | None = None,
) -> Reply:
    """Send one request on a new connection, read the answer to its end and check it.

    Callers that watch the answer while it arrives pass `reply`.
    """
    reply = Reply() if reply is None else reply
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection(*server.address)
            try:
                writer.write(request_bytes(path, body, headers))
                await read_reply(reader, reply)
            finally:
                writer.close()
        judge(reply)
    except MalformedError as error:
        reply.problem = str(error)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        reply.problem = f"{type(error).__name__}: {error}"
    reply.ended = reply.ended or time.monotonic()
    return reply


async def all_begun(replies: Sequence[Reply]) -> None:
    """Wait until two pieces of each reply have arrived."""
    while any(len(reply.times) < 2 for reply in replies):
        assert not any(reply.ended for reply in replies), "one ended before all had begun"
        await asyncio.sleep(0.01)


async def look(server: HasAddress, path: str) -> Reply:
    """A cheap GET, which can be repeated every few milliseconds; not checked."""
    reply = Reply()
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    try:
        await read_reply(reader, reply)
    finally:
        writer.close()
    return reply


async def read_head(reader: asyncio.StreamReader, reply: Reply) -> None:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    reply.status = int(lines[0].split(" ", 2)[1])
    for line in lines[1:]:
        name, _, value = line.partition(":")
        reply.headers[name.lower()] = value.strip()


async def read_reply(reader: asyncio.StreamReader, reply: Reply) -> None:
    """Read header and body. Raises if the body ends before its transfer coding says so."""
    await read_head(reader, reply)
    pieces: list[bytes] = []
    if reply.headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            pieces.append((await reader.readexactly(size + 2))[:-2])
            if not pieces[-1].startswith(b":"):  # a comment, which keeps the connection open
                reply.times.append(time.monotonic())
        await reader.readexactly(2)
    else:
        pieces.append(await reader.readexactly(int(reply.headers["content-length"])))
        reply.times.append(time.monotonic())
    reply.body = b"".join(pieces)
    reply.ended = time.monotonic()


def judge(reply: Reply) -> None:
    """Fill in the texts or the error, or raise what is wrong with the answer."""
    if reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream"):
        _judge_stream(reply)
    elif reply.status == 200:
        for choice in json.loads(reply.body)["choices"]:
            _expect(choice["finish_reason"] is not None, "a choice without an end")
            reply.texts[choice["index"]] = _said(choice, "message")
    else:
        _expect(reply.status >= 400, f"status {reply.status}")
        reply.error = _well_formed(json.loads(reply.body))


def _judge_stream(reply: Reply) -> None:
    stream = read_stream(httpx.Headers(reply.headers), reply.body)
    _expect(not stream.problems, "; ".join(stream.problems[:3]))
    _expect(bool(stream.events), "a stream without events")
    payloads = [event.data for event in stream.events]
    last = payloads.pop()
    if last != DONE:
        reply.error = _well_formed(json.loads(last))
    chunks = [json.loads(payload) for payload in payloads if payload != DONE]
    _expect(len(chunks) == len(payloads), "something follows [DONE]")
    _expect(not any("error" in chunk for chunk in chunks), "something follows an error")
    for name in ("id", "created", "model", "object"):
        _expect(len({chunk[name] for chunk in chunks}) <= 1, f"{name} changes within a stream")
    _join_choices(reply, chunks)


def _join_choices(reply: Reply, chunks: list[dict[str, Any]]) -> None:
    ended: set[int] = set()
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        index = choice["index"]
        _expect(index not in ended, f"choice {index} goes on after its end")
        reply.texts[index] = reply.texts.get(index, "") + _said(choice, "delta")
        reply.scores.setdefault(index, []).extend(_scores(choice))
        if choice["finish_reason"] is not None:
            ended.add(index)
    if reply.error is None:
        _expect(bool(ended) and ended == set(reply.texts), "[DONE] before every choice has ended")


def _said(choice: dict[str, Any], part: str) -> str:
    """The choice's text, and the arguments of its tool calls."""
    if "text" in choice:
        return str(choice["text"])
    message = choice[part]
    calls = [call["function"].get("arguments") for call in message.get("tool_calls") or ()]
    return "".join(text for text in (message.get("content"), *calls) if text)


def _scores(choice: dict[str, Any]) -> list[float]:
    return list((choice.get("logprobs") or {}).get("token_logprobs") or ())


def _well_formed(body: Any) -> dict[str, Any]:
    error = body.get("error") if isinstance(body, dict) else None
    _expect(isinstance(error, dict) and set(error) == ERROR_KEYS, f"no error: {str(body)[:120]}")
    assert isinstance(error, dict)
    return error


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise MalformedError(problem)
