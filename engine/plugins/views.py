"""Makes the requests and answers that plugins get, and checks and applies the plugins' changes."""

import copy
import hashlib
import time
from typing import Any

import msgspec

from engine.core.errors import EngineError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    EmbedRequest,
    Event,
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    TextPair,
    ToolCallEvent,
    UsageEvent,
)
from engine.core.interfaces.plugin import PluginChoice, PluginRequest, PluginResponse
from engine.core.interfaces.request import SamplingParams

Request = ChatRequest | CompletionRequest | EmbedRequest

_FIXED = ("request_id", "kind", "model", "tenant")
_ROLES = ("system", "user", "assistant", "tool")
# Sampling parameters that a plugin may change, and their bounds. Plugins can't change other
# parameters, because those affect the format of the answer.
_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
}


def view_of(request: Request) -> PluginRequest:
    """The request in the form that plugins get. It shares its messages with `request`, so a plugin
    must get a copy of it (`copied`).
    """
    if isinstance(request, EmbedRequest):
        return PluginRequest(
            request_id=request.request_id,
            kind="embedding",
            model=request.model,
            tenant=_pseudonym(request.salt),
            inputs=tuple(text for each in request.inputs for text in _texts(each)),
        )
    context = request.context
    is_chat = isinstance(request, ChatRequest)
    return PluginRequest(
        request_id=context.request_id,
        kind="chat" if is_chat else "completion",
        model=context.model,
        tenant=_pseudonym(context.tenant),
        params=context.params,
        messages=request.messages if isinstance(request, ChatRequest) else (),
        tools=request.tools if isinstance(request, ChatRequest) else (),
        prompt=None if isinstance(request, ChatRequest) else request.prompt,
        suffix=None if isinstance(request, ChatRequest) else request.suffix,
    )


def _texts(asked: str | tuple[int, ...] | TextPair) -> tuple[str | tuple[int, ...], ...]:
    return (asked.first, asked.second) if isinstance(asked, TextPair) else (asked,)


def copied(view: PluginRequest) -> PluginRequest:
    """A deep copy that a plugin may keep or modify."""
    return copy.deepcopy(view)


def applied(request: Request, view: PluginRequest) -> Request:
    """The request with the plugins' changes."""
    if isinstance(request, EmbedRequest):
        texts = iter(view.inputs)
        inputs = tuple(
            TextPair(str(next(texts)), str(next(texts)))
            if isinstance(each, TextPair)
            else next(texts)
            for each in request.inputs
        )
        return msgspec.structs.replace(request, inputs=inputs)
    assert view.params is not None
    context = msgspec.structs.replace(request.context, params=view.params)
    if isinstance(request, ChatRequest):
        return msgspec.structs.replace(
            request, context=context, messages=view.messages, tools=view.tools
        )
    assert view.prompt is not None
    return msgspec.structs.replace(request, context=context, prompt=view.prompt, suffix=view.suffix)


def mistake_in(changed: Any, before: PluginRequest) -> str | None:
    """Why the result of a hook is invalid. None if it is valid. The text contains no values of the
    request.
    """
    if changed is None:
        return None
    if not isinstance(changed, PluginRequest):
        return "pre_inference must return a PluginRequest or None"
    for name in _FIXED:
        if getattr(changed, name) != getattr(before, name):
            return f"{name} may not be changed"
    try:
        msgspec.convert(msgspec.to_builtins(changed), PluginRequest, strict=False)
    except (msgspec.ValidationError, TypeError, RecursionError):
        return "the changed request has values of the wrong type"
    return (
        _mistake_in_messages(changed.messages, before)
        or _mistake_in_prompt(changed, before)
        or _mistake_in_params(changed.params, before.params)
    )


def _mistake_in_messages(messages: Any, before: PluginRequest) -> str | None:
    if bool(messages) != bool(before.messages):
        return "messages may not be added to another kind of request, nor all be taken away"
    for message in messages:
        if message.get("role") not in _ROLES or not isinstance(message.get("content"), str):
            return "each message needs a role and a content that is a string"
    return None


def _mistake_in_prompt(changed: PluginRequest, before: PluginRequest) -> str | None:
    if (changed.prompt is None) != (before.prompt is None):
        return "prompt must stay a prompt"
    if len(changed.inputs) != len(before.inputs):
        return "the number of inputs may not be changed"
    return None


def _mistake_in_params(changed: SamplingParams | None, before: SamplingParams | None) -> str | None:
    if changed is None or before is None:
        return None if changed is before else "params may not be taken away"
    for name in SamplingParams.__struct_fields__:
        value = getattr(changed, name)
        if value == getattr(before, name):
            continue
        if name == "stop":
            if len(value) > 16 or not all(1 <= len(each) <= 256 for each in value):
                return "params.stop must be at most 16 texts of 1 to 256 characters"
            continue
        if name not in _RANGES:
            return f"params.{name} may not be changed"
        low, high = _RANGES[name]
        if value is None or not low <= value <= high:
            return f"params.{name} must be {low:g} to {high:g}"
    return None


class ResponseBuilder:
    """Collects the events of an answer and builds the `PluginResponse` from them."""

    def __init__(self, num_choices: int) -> None:
        self._began = time.monotonic()
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._reasoning: list[list[str]] = [[] for _ in range(num_choices)]
        self._calls: list[dict[int, dict[str, str]]] = [{} for _ in range(num_choices)]
        self._finished: list[FinishEvent | None] = [None] * num_choices
        self._usage: UsageEvent | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, TextEvent):
            self._texts[event.choice].append(event.text)
        elif isinstance(event, ReasoningEvent):
            self._reasoning[event.choice].append(event.text)
        elif isinstance(event, ToolCallEvent):
            calls = self._calls[event.choice]
            if event.index not in calls:
                new = {"id": event.call_id or "", "name": event.name or "", "arguments": ""}
                calls[event.index] = new
            calls[event.index]["arguments"] += event.arguments
        elif isinstance(event, FinishEvent):
            self._finished[event.choice] = event
        else:
            self._usage = event

    def response(
        self, request: PluginRequest, error: BaseException | None = None
    ) -> PluginResponse:
        code = None
        if error is not None:
            code = error.error_code if isinstance(error, EngineError) else "ABORTED"
        return PluginResponse(
            request=copied(request),
            choices=tuple(self._choice(index) for index in range(len(self._texts))),
            usage=self._usage,
            error=code,
            elapsed_s=time.monotonic() - self._began,
        )

    def finish(self, choice: int) -> FinishEvent:
        ended = self._finished[choice]
        assert ended is not None
        return ended

    def _choice(self, index: int) -> PluginChoice:
        ended = self._finished[index]
        return PluginChoice(
            text="".join(self._texts[index]),
            reasoning="".join(self._reasoning[index]),
            tool_calls=tuple(dict(call) for _, call in sorted(self._calls[index].items())),
            finish_reason=None if ended is None else ended.reason,
        )


def _pseudonym(tenant: str) -> str:
    """A one-way hash of the tenant's name. The name itself is derived from the tenant's key."""
    return hashlib.sha256(f"plugin:{tenant}".encode()).hexdigest()[:16] if tenant else ""
