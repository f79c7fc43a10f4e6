"""SSE events of a streamed response.

Each event has a `type`, which is also the SSE event name, and an increasing `sequence_number`. A
failed stream ends with `error`, on which OpenAI's SDKs raise, and `response.failed`, for clients
that wait for a final state. This API has no `[DONE]`.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from engine.core.errors import EngineError
from engine.core.interfaces.backend import UsageEvent
from engine.servers.http.errors import error_fields
from engine.servers.openai.format import chat_logprobs
from engine.servers.responses.format import failed
from engine.servers.responses.items import Item
from engine.servers.responses.output import Change, Output, part_of
from engine.servers.serving.event_pump import OutputEvent

_encode = msgspec.json.Encoder().encode
# Event names for the text of each kind of item.
_TEXTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class ResponseStream:
    """`finished` returns the whole response after a successful generation."""

    def __init__(self, begun: Item, finished: Callable[[], Item]) -> None:
        self._begun = begun
        self._finished = finished
        self._output = Output(begun["id"])
        self._num_sent = 0

    def opening(self) -> bytes:
        return self._event("response.created", response=self._begun) + self._event(
            "response.in_progress", response=self._begun
        )

    def chunk(self, event: OutputEvent) -> bytes:
        steps = {"added": self._added, "delta": self._delta, "done": self._done}
        return b"".join([steps[change.step](change) for change in self._output.push(event)])

    def closing(self, usage: UsageEvent) -> bytes:
        response = self._finished()
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: EngineError) -> bytes:
        detail = error_fields(error)
        # OpenAI documents a flat error but sends a nested one, and its SDKs only raise on the
        # nested one. So send both.
        flat = {key: detail[key] for key in ("code", "message", "param")}
        return self._event("error", **flat, error=detail) + self._event(
            "response.failed", response=failed(self._begun, self._output, error)
        )

    def _added(self, change: Change) -> bytes:
        added = self._event(
            "response.output_item.added", output_index=change.output_index, item=change.item
        )
        kind = change.item["type"]
        if kind == "function_call":
            return added
        place = self._place(change)
        return added + self._event(
            "response.content_part.added", **place, part=part_of(kind, "", ())
        )

    def _delta(self, change: Change) -> bytes:
        kind, place = change.item["type"], self._place(change)
        if kind == "message":
            place["logprobs"] = chat_logprobs(change.logprobs)["content"]
        return self._event(f"{_TEXTS[kind]}.delta", **place, delta=change.delta)

    def _done(self, change: Change) -> bytes:
        item, place = change.item, self._place(change)
        ended_text = f"{_TEXTS[item['type']]}.done"
        if item["type"] == "function_call":
            ended = self._event(ended_text, **place, name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            ended = self._event(ended_text, **place, text=part["text"], **more)
            ended += self._event("response.content_part.done", **place, part=part)
        return ended + self._event(
            "response.output_item.done", output_index=change.output_index, item=item
        )

    def _place(self, change: Change) -> dict[str, Any]:
        place = {"item_id": change.item["id"], "output_index": change.output_index}
        if change.item["type"] != "function_call":
            place["content_index"] = 0
        return place

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_sent
        self._num_sent += 1
        data = _encode({"type": kind, "sequence_number": number} | fields)
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
