"""Formats a response as a `response` object, and its stream as SSE events.

Each event has a `type`, which is also the name of the SSE event, and an increasing
`sequence_number`. A failed stream ends with two events. OpenAI's SDKs raise an exception on
`error`; other clients wait for the final state in `response.failed`. This API has no `[DONE]`.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from engine.core.errors import EngineError, InvalidRequestError, RateLimitError
from engine.core.interfaces.backend import ModelCard, UsageEvent
from engine.servers.http.errors import error_fields, short_message
from engine.servers.openai.logprobs import chat_logprobs
from engine.servers.responses.items import Item
from engine.servers.responses.output import Change, Output, part_of
from engine.servers.responses.schema import ReasoningConfig, ResponseBody
from engine.servers.responses.tools import echo_tools
from engine.servers.serving.event_pump import OutputEvent


def outline(body: ResponseBody, response_id: str, card: ModelCard, is_stored: bool) -> Item:
    """A `response` object that has just started: it has the request's parameters and no output
    yet.
    """
    reasoning = body.reasoning or ReasoningConfig()
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "model": card.id,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "conversation": None if body.conversation is None else {"id": body.conversation},
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {
            "format": body.text_format.echo,
            "verbosity": None if body.text is None else body.text.verbosity,
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": echo_tools(body.offered.functions),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def finished(begun: Item, output: Output, usage: UsageEvent) -> Item:
    """The response `begun` with its output and usage. Its status is `incomplete` if the length
    limit was reached.
    """
    ending: Item
    if output.finish is not None and output.finish.reason == "length":
        ending = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    else:
        ending = {"status": "completed", "completed_at": int(time.time())}
    return begun | ending | {"output": output.items, "usage": usage_body(usage)}


def failed(begun: Item, output: Output, error: EngineError) -> Item:
    """The response `begun` with its partial output and the error."""
    code = "server_error"
    if isinstance(error, RateLimitError):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequestError):
        code = "invalid_prompt"
    ending = {"status": "failed", "error": {"code": code, "message": short_message(error)}}
    return begun | ending | {"output": output.items}


def usage_body(usage: UsageEvent) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        # Cache writes are reported as 0, because clients don't pay for them.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


_encode = msgspec.json.Encoder().encode
# Maps the type of an item to the event name for its text, without `.delta` or `.done`.
_TEXTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class ResponseStream:
    """Formats a streamed response as SSE events. After a successful generation, `finished` returns
    the complete response. Events up to number `after` are left out.
    """

    def __init__(self, begun: Item, finished: Callable[[], Item], after: int = -1) -> None:
        self._begun = begun
        self._finished = finished
        self._after = after
        self._output = Output(begun["id"])
        self._num_events = 0
        self._is_waiting = begun["status"] == "queued"

    def opening(self) -> bytes:
        second = "response.queued" if self._is_waiting else "response.in_progress"
        created = self._event("response.created", response=self._begun)
        return created + self._event(second, response=self._begun)

    def chunk(self, event: OutputEvent) -> bytes:
        begun = self._start() if self._is_waiting else b""
        steps = {"added": self._added, "delta": self._delta, "done": self._done}
        return begun + b"".join([steps[change.step](change) for change in self._output.push(event)])

    def closing(self, usage: UsageEvent) -> bytes:
        response = self._finished()
        status = response["status"]
        # There is no event for a cancelled response. Clients take this one as its end.
        kind = "incomplete" if status == "cancelled" else status
        return self._event(f"response.{kind}", response=response)

    def _start(self) -> bytes:
        """An event that says that a queued response is in progress now."""
        self._is_waiting = False
        response = self._begun | {"status": "in_progress"}
        return self._event("response.in_progress", response=response)

    def failure(self, error: EngineError) -> bytes:
        detail = error_fields(error)
        # OpenAI documents error events with their fields at the top level. But OpenAI sends them in
        # a nested object, and its SDKs raise only for the nested form. So both forms are sent.
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
        number = self._num_events
        self._num_events += 1
        if number <= self._after:
            return b""
        data = _encode({"type": kind, "sequence_number": number} | fields)
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
