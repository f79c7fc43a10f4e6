"""Converts the backend's events to output items, in order: reasoning, a message, function calls.

One item is open at a time. An event of another kind closes it. A stream uses two `Output` objects:
one builds the finished response as events arrive, the other provides the changes to send to the
client. Ids of items are derived from the response id and the index, so both objects have the same
items.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from engine.core.interfaces.backend import (
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
)
from engine.servers.openai.logprobs import chat_logprobs
from engine.servers.responses.items import Item, item_id
from engine.servers.serving.event_pump import OutputEvent

Kind = Literal["reasoning", "message", "function_call"]


class Change(NamedTuple):
    """One change of an output item. `item` is the item's state after the change."""

    step: Literal["added", "delta", "done"]
    output_index: int
    item: Item
    delta: str = ""
    logprobs: Sequence[TokenText] = ()  # logprobs of the delta's tokens


class _OpenItem:
    """The item that is being written. `key` is the index of a tool call, so that each call is a
    separate item. It is 0 for other items.
    """

    def __init__(self, kind: Kind, key: int, item: Item) -> None:
        self.kind = kind
        self.key = key
        self.item = item
        self.pieces: list[str] = []
        self.logprobs: list[TokenText] = []

    def done(self, is_complete: bool) -> Item:
        text = "".join(self.pieces)
        filled = {"status": "completed" if is_complete else "incomplete"}
        if self.kind == "function_call":
            return self.item | filled | {"arguments": text}
        return self.item | filled | {"content": [part_of(self.kind, text, self.logprobs)]}


class Output:
    def __init__(self, response_id: str) -> None:
        self.items: list[Item] = []  # finished items
        self.finish: FinishEvent | None = None
        self._response_id = response_id
        self._open: _OpenItem | None = None
        # Logprobs of tokens whose text has not arrived yet.
        self._early_logprobs: list[TokenText] = []

    def push(self, event: OutputEvent) -> list[Change]:
        if isinstance(event, FinishEvent):
            return self._end(event)
        if isinstance(event, ReasoningEvent):
            self._early_logprobs.clear()
            return self._write("reasoning", event.text)
        if isinstance(event, ToolCallEvent):
            self._early_logprobs.clear()
            call = {"call_id": event.call_id, "name": event.name}
            return self._write("function_call", event.arguments, event.index, call)
        return self._text(event)

    def _text(self, event: TextEvent) -> list[Change]:
        logprobs = event.logprobs or ()
        if event.text:
            logprobs = (*self._early_logprobs, *logprobs)
            self._early_logprobs.clear()
            return self._write("message", event.text, logprobs=logprobs)
        # The event has no text: its tokens are an incomplete character, or part of reasoning or of
        # a tool call.
        if self._open is None or self._open.kind == "message":
            self._early_logprobs += logprobs
        return []

    def _write(
        self,
        kind: Kind,
        text: str,
        key: int = 0,
        more: Item | None = None,
        logprobs: Sequence[TokenText] = (),
    ) -> list[Change]:
        changes: list[Change] = []
        current = self._open
        if current is None or (current.kind, current.key) != (kind, key):
            changes += self._close(is_complete=True)
            current = self._begin(kind, key, more or {})
            changes.append(Change("added", len(self.items), current.item))
        if text or logprobs:
            current.pieces.append(text)
            current.logprobs += logprobs
            changes.append(Change("delta", len(self.items), current.item, text, logprobs))
        return changes

    def _begin(self, kind: Kind, key: int, more: Item) -> _OpenItem:
        item: Item = {
            "id": item_id(kind, self._response_id, len(self.items)),
            "type": kind,
            "status": "in_progress",
        }
        if kind == "function_call":
            item |= more | {"arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._open = _OpenItem(kind, key, item)
        return self._open

    def _close(self, is_complete: bool) -> list[Change]:
        if self._open is None:
            return []
        changes: list[Change] = []
        if self._open.kind == "function_call" and is_complete and not self._open.pieces:
            # A call without arguments gets an empty object.
            changes = self._write("function_call", "{}", self._open.key)
        closed, self._open = self._open, None
        self.items.append(closed.done(is_complete))
        return [*changes, Change("done", len(self.items) - 1, self.items[-1])]

    def _end(self, event: FinishEvent) -> list[Change]:
        self.finish = event
        # An answer without any item gets an empty message, because the next turn needs an answer to
        # follow.
        changes = [] if self._open or self.items else self._write("message", "")
        if self._early_logprobs and self._open is not None and self._open.kind == "message":
            changes += self._write("message", "", logprobs=self._early_logprobs)
        return changes + self._close(is_complete=event.reason != "length")


def part_of(kind: Kind, text: str, logprobs: Sequence[TokenText]) -> Item:
    """The only content part of a message item or a reasoning item."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": chat_logprobs(logprobs)["content"],
    }
