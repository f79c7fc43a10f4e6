"""Events as OpenAI's JSON: whole answers, and the chunks of a stream.

A chunk is one per token, so everything that a stream repeats (id, model, braces) is encoded once
and each chunk is a few bytes joined around its text.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core.interfaces.backend import (
    FinishEvent,
    ModelCard,
    TextEvent,
    TokenText,
    TopLogprob,
    UsageEvent,
)
from engine.servers.generation import OutputEvent

_encode = msgspec.json.Encoder().encode
# JSON has no infinity; clients know this number as "impossible".
_MIN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the answer and all of its chunks say alike."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def new_envelope(completion_id: str, card: ModelCard) -> Envelope:
    return Envelope(completion_id, int(time.time()), card.id, fingerprint(card))


def fingerprint(card: ModelCard) -> str:
    """Changes when the same seed might answer otherwise: other weights, another backend."""
    return "fp_" + hashlib.sha256(_encode(card)).hexdigest()[:12]


def usage_body(usage: UsageEvent) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _clamped(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


def _chat_entry(token: TokenText | TopLogprob) -> dict[str, Any]:
    return {
        "token": token.token,
        "logprob": _clamped(token.logprob),
        "bytes": list(token.token_bytes),
    }


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    content = [
        _chat_entry(token) | {"top_logprobs": [_chat_entry(each) for each in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def legacy_logprobs(tokens: Sequence[TokenText], offset: int) -> dict[str, Any]:
    """The parallel lists of `/v1/completions`; `offset` is where the first token's text begins."""
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [_clamped(token.logprob) for token in tokens],
        "top_logprobs": [_ranked(token) for token in tokens],
        "text_offset": offsets,
    }


def _ranked(token: TokenText) -> dict[str, float]:
    """The chosen token is always among them, even when it was not one of the likeliest."""
    ranked = {each.token: _clamped(each.logprob) for each in token.top}
    ranked.setdefault(token.token, _clamped(token.logprob))
    return ranked


class Collected:
    """The choices of an answer that is sent whole."""

    def __init__(self, num_choices: int) -> None:
        self.texts: list[list[str]] = [[] for _ in range(num_choices)]
        self.tokens: list[list[TokenText]] = [[] for _ in range(num_choices)]
        self.finish: list[FinishEvent | None] = [None] * num_choices

    def add(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            if isinstance(event, FinishEvent):
                self.finish[event.choice] = event
                continue
            self.texts[event.choice].append(event.text)
            if event.logprobs is not None:
                self.tokens[event.choice].extend(event.logprobs)

    def endings(self) -> list[dict[str, Any]]:
        return [_ending(finish) for finish in self.finish]


def _ending(finish: FinishEvent | None) -> dict[str, Any]:
    if finish is None:
        return {"finish_reason": None}
    return {"finish_reason": finish.reason, "stop_reason": finish.stop_reason}


def chat_body(
    envelope: Envelope, collected: Collected, usage: UsageEvent, with_logprobs: bool
) -> bytes:
    choices = []
    for index, ending in enumerate(collected.endings()):
        text = "".join(collected.texts[index])
        logprobs = chat_logprobs(collected.tokens[index]) if with_logprobs else None
        message = {"role": "assistant", "content": text, "refusal": None}
        choices.append({"index": index, "message": message, "logprobs": logprobs} | ending)
    fields = envelope.fields("chat.completion")
    return _encode(fields | {"choices": choices, "usage": usage_body(usage)})


def completion_body(
    envelope: Envelope, collected: Collected, usage: UsageEvent, with_logprobs: bool
) -> bytes:
    choices = []
    for index, ending in enumerate(collected.endings()):
        text = "".join(collected.texts[index])
        logprobs = legacy_logprobs(collected.tokens[index], 0) if with_logprobs else None
        choices.append({"index": index, "text": text, "logprobs": logprobs} | ending)
    fields = envelope.fields("text_completion")
    return _encode(fields | {"choices": choices, "usage": usage_body(usage)})


class _ChunkStream:
    """Bytes before and after the one choice that each chunk has."""

    def __init__(self, envelope: Envelope, kind: str, include_usage: bool) -> None:
        self.head = b"data: " + _encode(envelope.fields(kind))[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage

    def closing(self, usage: UsageEvent) -> bytes:
        if not self._include_usage:
            return b""
        return self.head + b'],"usage":' + _encode(usage_body(usage)) + b"}\n\n"


class ChatStream(_ChunkStream):
    """Chunks of `/v1/chat/completions`: each choice begins with its role."""

    def __init__(self, envelope: Envelope, num_choices: int, include_usage: bool) -> None:
        super().__init__(envelope, "chat.completion.chunk", include_usage)
        self._before = [
            self.head + b'{"index":%d,"delta":{' % index for index in range(num_choices)
        ]
        self._after = b'},"logprobs":null,"finish_reason":null}' + self.tail

    def opening(self) -> bytes:
        role = b'"role":"assistant","content":""'
        return b"".join(before + role + self._after for before in self._before)

    def chunk(self, event: OutputEvent) -> bytes:
        before = self._before[event.choice]
        if isinstance(event, FinishEvent):
            ending = _encode(_ending(event))[1:]
            return before + b'},"logprobs":null,' + ending + self.tail
        if event.logprobs:
            logprobs = _encode(chat_logprobs(event.logprobs))
            after = b'},"logprobs":' + logprobs + b',"finish_reason":null}' + self.tail
            return before + b'"content":' + _encode(event.text) + after
        if not event.text:
            return b""
        return before + b'"content":' + _encode(event.text) + self._after


class CompletionStream(_ChunkStream):
    """Chunks of `/v1/completions`."""

    def __init__(self, envelope: Envelope, num_choices: int, include_usage: bool) -> None:
        super().__init__(envelope, "text_completion", include_usage)
        self._before = [self.head + b'{"index":%d,"text":' % index for index in range(num_choices)]
        self._after = b',"logprobs":null,"finish_reason":null}' + self.tail
        self._offsets = [0] * num_choices

    def opening(self) -> bytes:
        return b""

    def chunk(self, event: OutputEvent) -> bytes:
        before = self._before[event.choice]
        if isinstance(event, FinishEvent):
            return before + b'"","logprobs":null,' + _encode(_ending(event))[1:] + self.tail
        if event.logprobs:
            return before + _encode(event.text) + self._logprobs(event)
        if not event.text:
            return b""
        return before + _encode(event.text) + self._after

    def _logprobs(self, event: TextEvent) -> bytes:
        assert event.logprobs is not None
        body = legacy_logprobs(event.logprobs, self._offsets[event.choice])
        self._offsets[event.choice] += sum(len(token.token) for token in event.logprobs)
        return b',"logprobs":' + _encode(body) + b',"finish_reason":null}' + self.tail
