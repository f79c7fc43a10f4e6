"""Formats the backend's events as Anthropic's JSON: a whole message, or the named events of a
stream.

An answer is a list of blocks (thinking, text, tool use). Each block is complete before the next
block starts. In a stream, events mark the start and end of each block. `input_tokens` does not
include cached prompt tokens, which are counted separately.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from engine.core.errors import EngineError
from engine.core.interfaces.backend import FinishEvent, ReasoningEvent, TextEvent, UsageEvent
from engine.servers.http.errors import anthropic_error_body
from engine.servers.serving.event_pump import OutputEvent

_encode = msgspec.json.Encoder().encode

Kind = Literal["text", "thinking", "tool_use"]
# Maps the kind of a block to the type of its deltas, and to the field of a delta with the text.
_DELTAS: dict[Kind, tuple[bytes, bytes]] = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}


@dataclass(frozen=True, slots=True)
class MessageEnvelope:
    """Fields of an answer that are known before its first token."""

    id: str
    model: str
    request_id: str
    shows_thinking: bool

    def message(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }


def usage_body(usage: UsageEvent) -> dict[str, Any]:
    """Anthropic's usage object. Cache writes cost the client nothing, so their count is 0."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def ending(finish: FinishEvent | None, has_calls: bool) -> dict[str, Any]:
    """The fields about the end of an answer. `stop_reason` is `max_tokens` if the length limit was
    reached, else `tool_use` if there is a tool call.
    """
    if finish is None:
        return {"stop_reason": None, "stop_sequence": None}
    if finish.reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if finish.reason == "tool_calls" or has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(finish.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text of one block. Pieces with equal kind and number belong to the same block."""

    kind: Kind
    number: int
    text: str
    call_id: str = ""
    name: str = ""

    def block(self) -> dict[str, Any]:
        """The block that starts with this piece, with empty text."""
        if self.kind == "text":
            return {"type": "text", "text": ""}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": {}}


def _piece(event: OutputEvent, shows_thinking: bool) -> Piece | None:
    """The piece of a block that an event adds. None for events that the client does not get: the
    end of a choice, and tokens without text.
    """
    if isinstance(event, FinishEvent):
        return None
    if isinstance(event, TextEvent):
        return Piece("text", 0, event.text) if event.text else None
    if isinstance(event, ReasoningEvent):
        return Piece("thinking", 0, event.text if shows_thinking else "")
    return Piece("tool_use", event.index, event.arguments, event.call_id or "", event.name or "")


@dataclass(slots=True)
class _Block:
    first: Piece
    texts: list[str] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        text = "".join(self.texts)
        if self.first.kind != "tool_use":
            return self.first.block() | {self.first.kind: text}
        return self.first.block() | {"input": _input(text)}


def _input(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a tool call. Returns {} if they are invalid JSON, because `max_tokens`
    cut them off. The stop reason shows this to the client.
    """
    try:
        decoded = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


class MessageAnswer:
    """Collects the events of an answer that is not streamed, and formats it as one message."""

    def __init__(self, envelope: MessageEnvelope) -> None:
        self._envelope = envelope
        self._blocks: list[_Block] = []
        self._finish: FinishEvent | None = None

    def add(self, events: Iterable[OutputEvent]) -> None:
        for event in events:
            if isinstance(event, FinishEvent):
                self._finish = event
            elif piece := _piece(event, self._envelope.shows_thinking):
                last = self._blocks[-1].first if self._blocks else None
                if last is None or (last.kind, last.number) != (piece.kind, piece.number):
                    self._blocks.append(_Block(piece))
                self._blocks[-1].texts.append(piece.text)

    def body(self, usage: UsageEvent) -> bytes:
        has_calls = any(block.first.kind == "tool_use" for block in self._blocks)
        filled = {
            "content": [block.body() for block in self._blocks],
            **ending(self._finish, has_calls),
            "usage": usage_body(usage) | {"service_tier": "standard"},
        }
        return _encode(self._envelope.message() | filled)


class MessageStream:
    """Formats a streamed message; implements `sse.StreamFormat`."""

    def __init__(self, envelope: MessageEnvelope, num_prompt: int) -> None:
        self._envelope = envelope
        self._num_prompt = num_prompt
        self._open: tuple[Kind, int] | None = None
        self._num_blocks = 0
        self._has_calls = False
        self._finish: FinishEvent | None = None
        self._before_delta = b""

    def opening(self) -> bytes:
        """The event `message_start`. How many of its input tokens are cached is not known yet;
        `message_delta` tells it.
        """
        begun = UsageEvent(prompt_tokens=self._num_prompt, completion_tokens=0, cached_tokens=0)
        usage = usage_body(begun) | {"service_tier": "standard"}
        message = self._envelope.message() | {"usage": usage}
        return _event("message_start", {"message": message})

    def chunk(self, event: OutputEvent) -> bytes:
        if isinstance(event, FinishEvent):
            self._finish = event
            return self._end_block()
        piece = _piece(event, self._envelope.shows_thinking)
        if piece is None:
            return b""
        head = b""
        if self._open != (piece.kind, piece.number):
            head = self._end_block() + self._begin_block(piece)
        if not piece.text:
            return head
        return head + self._before_delta + _encode(piece.text) + b"}}\n\n"

    def closing(self, usage: UsageEvent) -> bytes:
        delta = ending(self._finish, self._has_calls)
        return (
            self._end_block()
            + _event("message_delta", {"delta": delta, "usage": usage_body(usage)})
            + _event("message_stop", {})
        )

    def failure(self, error: EngineError) -> bytes:
        return _framed("error", anthropic_error_body(error, self._envelope.request_id))

    def _begin_block(self, piece: Piece) -> bytes:
        index = self._num_blocks
        self._num_blocks += 1
        self._open = (piece.kind, piece.number)
        self._has_calls = self._has_calls or piece.kind == "tool_use"
        kind, name = _DELTAS[piece.kind]
        # The bytes of each delta event of this block, up to its text.
        self._before_delta = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":' % (index, kind, name)
        )
        return _event("content_block_start", {"index": index, "content_block": piece.block()})

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", {"index": self._num_blocks - 1})


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return _framed(name, _encode({"type": name} | fields))


def _framed(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
