"""Formats the backend's events as Ollama's JSON: complete answers, and the lines of a stream.

Each line of a stream has the next piece of the answer. The last line has only the counts and
times. Times are in nanoseconds.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from engine.core.errors import EngineError
from engine.core.interfaces.backend import (
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
    UsageEvent,
)
from engine.servers.http.errors import plain_error_body
from engine.servers.openai.format import Call, Choice
from engine.servers.openai.logprobs import chat_logprobs
from engine.servers.serving.event_pump import OutputEvent

_encode = msgspec.json.Encoder().encode


def timestamp(seconds: float | None = None) -> str:
    """A time in RFC 3339. The default is now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def line(body: dict[str, Any]) -> bytes:
    return _encode(body) + b"\n"


class Answer:
    """Formats one answer. `model` is the name that the client sent, and `started` is when its
    request arrived (`time.monotonic()`). Answers of `/api/chat` have a `message`, those of
    `/api/generate` have a `response`.
    """

    def __init__(self, model: str, started: float, is_chat: bool) -> None:
        self._model = model
        self._started = started
        self._is_chat = is_chat
        self._call: Call | None = None  # the tool call whose arguments arrive
        self._num_calls = 0
        self._reason = "stop"

    def opening(self) -> bytes:
        return b""

    def chunk(self, event: OutputEvent) -> bytes:
        if isinstance(event, TextEvent):
            if not event.text and not event.logprobs:
                return b""
            return self._piece(self._part(event.text), event.logprobs or ())
        if isinstance(event, ReasoningEvent):
            return self._piece(self._part("", thinking=event.text))
        if isinstance(event, FinishEvent):
            self._reason = "length" if event.reason == "length" else "stop"
            return self._end_call()
        return self._add_to_call(event)

    def closing(self, usage: UsageEvent) -> bytes:
        return line(self._head() | self._part("") | self._end(self._reason, usage))

    def failure(self, error: EngineError) -> bytes:
        return plain_error_body(error) + b"\n"

    def whole(self, choice: Choice, usage: UsageEvent) -> bytes:
        calls = [_call_body(call, index) for index, call in enumerate(choice.calls.values())]
        part = self._part(
            choice.text,
            thinking="".join(choice.reasoning),
            calls=[call for call in calls if call is not None],
        )
        is_cut = choice.finish is not None and choice.finish.reason == "length"
        end = self._end("length" if is_cut else "stop", usage)
        return _encode(self._head() | part | _logprobs(choice.tokens) | end)

    def without_text(self, reason: str) -> bytes:
        """The answer to a request that only loads or unloads a model."""
        return line(self._head() | self._part("") | {"done": True, "done_reason": reason})

    def _piece(self, part: dict[str, Any], tokens: Sequence[TokenText] = ()) -> bytes:
        return line(self._head() | part | _logprobs(tokens) | {"done": False})

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": timestamp()}

    def _part(
        self, text: str, thinking: str = "", calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": text} | more
        if calls:
            more["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": text} | more}

    def _add_to_call(self, event: ToolCallEvent) -> bytes:
        ended = b""
        if event.name is not None:
            ended = self._end_call()
            self._call = Call(event.call_id or "", event.name, [])
        if self._call is not None:
            self._call.arguments.append(event.arguments)
        return ended

    def _end_call(self) -> bytes:
        """A line with the tool call that is complete now, if there is one."""
        body = None if self._call is None else _call_body(self._call, self._num_calls)
        self._call = None
        if body is None:
            return b""
        self._num_calls += 1
        return self._piece(self._part("", calls=[body]))

    def _end(self, reason: str, usage: UsageEvent) -> dict[str, Any]:
        total = time.monotonic() - self._started
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": _nanoseconds(total),
            # Everything before the prompt was computed: loading the model, and waiting.
            "load_duration": _nanoseconds(total - usage.prefill_s - usage.decode_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(usage.prefill_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(usage.decode_s),
        }


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))  # clients divide by durations


def _logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    return {"logprobs": chat_logprobs(tokens)["content"]} if tokens else {}


def _call_body(call: Call, index: int) -> dict[str, Any] | None:
    """A tool call with its arguments as an object. None if the answer ended within them."""
    try:
        arguments = msgspec.json.decode("".join(call.arguments) or "{}")
    except msgspec.DecodeError:
        return None
    function = {"index": index, "name": call.name, "arguments": arguments}
    return {"id": call.call_id, "function": function}
