"""Sends one streamed request to an OpenAI-compatible server and times it.

ttft: from sending to the first chunk that carries a token. gaps: between consecutive such chunks
(one token each on most servers). A token may have no text (half a character), so every chunk counts
except those that only open (role) or close (finish reason) the answer.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

ACCEPTED_DRAFTS = "vllm:spec_decode_num_accepted_tokens_total"  # in the metrics of both servers


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what every body carries besides the scenario's own fields."""

    base_url: str  # without /v1
    model: str
    extra_body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request; times in seconds."""

    ttft: float
    gaps: tuple[float, ...]
    e2e: float
    prompt_tokens: int | None
    output_tokens: int
    cached_tokens: int | None
    chunks: int
    counted_by_usage: bool
    text: str

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first."""
        return sum(self.gaps) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str


Outcome = Sample | Failure


def new_session(timeout: float) -> aiohttp.ClientSession:
    """Opens one connection per request: some servers drop idle connections just as they are
    reused.
    """
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_read=timeout),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    )


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    async with session.get(f"{base_url}/v1/models") as response:
        response.raise_for_status()
        return str((await response.json(content_type=None))["data"][0]["id"])


async def accepted_drafts(session: aiohttp.ClientSession, base_url: str) -> int:
    """How many draft tokens the server has accepted so far; 0 if its metrics do not say."""
    try:
        async with session.get(f"{base_url}/metrics") as response:
            lines = (await response.text()).splitlines() if response.status == 200 else []
    except aiohttp.ClientError:
        return 0
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(ACCEPTED_DRAFTS)))


async def complete(
    session: aiohttp.ClientSession, target: Target, prompt: str, max_tokens: int
) -> Outcome:
    return await _stream(session, target, "/v1/completions", {"prompt": prompt}, max_tokens)


async def chat(
    session: aiohttp.ClientSession,
    target: Target,
    messages: list[dict[str, str]],
    max_tokens: int,
    **fields: Any,
) -> Outcome:
    body = {"messages": messages, **fields}
    return await _stream(session, target, "/v1/chat/completions", body, max_tokens)


async def _stream(
    session: aiohttp.ClientSession,
    target: Target,
    path: str,
    question: Mapping[str, Any],
    max_tokens: int,
) -> Outcome:
    body = {
        "model": target.model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **question,
        **target.extra_body,
    }
    reading = _Reading()
    started = time.perf_counter()
    try:
        async with session.post(target.base_url + path, json=body) as response:
            if response.status != 200:
                return Failure(f"{response.status} {(await response.text())[:200]}")
            async for line in response.content:
                if line.startswith(b"data:") and reading.feed(line[5:].strip()):
                    break
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return Failure(f"{type(error).__name__}: {error}"[:200])
    return reading.outcome(started, time.perf_counter())


class _Reading:
    """The events of one stream so far."""

    def __init__(self) -> None:
        self._stamps: list[float] = []
        self._text: list[str] = []
        self._usage: dict[str, Any] = {}
        self._error: str | None = None

    def feed(self, data: bytes) -> bool:
        """Process one event; True if it is the last."""
        now = time.perf_counter()
        if data == b"[DONE]":
            return True
        event = json.loads(data)
        if event.get("error"):
            self._error = str(event["error"])[:200]
            return True
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
            if text or (choice.get("finish_reason") is None and "role" not in delta):
                self._stamps.append(now)
                self._text.append(text or "")
        return False

    def outcome(self, started: float, ended: float) -> Outcome:
        if self._error is not None:
            return Failure(self._error)
        if not self._stamps:
            return Failure("no token came back")
        counted = self._usage.get("completion_tokens")
        details = self._usage.get("prompt_tokens_details") or {}
        return Sample(
            ttft=self._stamps[0] - started,
            gaps=tuple(b - a for a, b in zip(self._stamps, self._stamps[1:], strict=False)),
            e2e=ended - started,
            prompt_tokens=self._usage.get("prompt_tokens"),
            output_tokens=counted or len(self._stamps),
            cached_tokens=details.get("cached_tokens"),
            chunks=len(self._stamps),
            counted_by_usage=bool(counted),
            text="".join(self._text),
        )
