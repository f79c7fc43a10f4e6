"""Formats the backend's events as OpenAI's JSON: complete answers, and the chunks of a stream.

A stream has about one chunk per token. The parts that are the same in all chunks (such as id and
model) are encoded only once and joined with the text of each chunk.
"""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from engine.core.errors import EngineError
from engine.core.interfaces.backend import (
    FinishEvent,
    ModelCard,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
    UsageEvent,
)
from engine.servers.openai.logprobs import chat_logprobs, legacy_logprobs, num_characters
from engine.servers.openai.token_fields import NO_FIELDS, TokenFields
from engine.servers.serving.event_pump import EventPump, OutputEvent
from engine.servers.serving.sse import DONE, error_event

_encode = msgspec.json.Encoder().encode
# The end of a chunk, if the stream has a usage. Text can't contain it, because JSON escapes line
# breaks.
END_OF_CHUNK = b'"usage":null}\n\n'
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields that are the same in all chunks of an answer."""

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
    """The `system_fingerprint`. It changes if the model or its backend changes, because then the
    same seed may give another answer.
    """
    return "fp_" + hashlib.sha256(_encode(card)).hexdigest()[:12]


def usage_body(usage: UsageEvent) -> dict[str, Any]:
    details = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.has_prediction:
        details["accepted_prediction_tokens"] = usage.num_accepted
        details["rejected_prediction_tokens"] = usage.num_drafted - usage.num_accepted
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": details,
    }


@dataclass(slots=True)
class Call:
    """The parts of a tool call that have arrived."""

    call_id: str
    name: str
    arguments: list[str]

    def body(self) -> dict[str, Any]:
        # Clients parse the arguments as JSON. So a call without arguments gets an empty object.
        function = {"name": self.name, "arguments": "".join(self.arguments) or "{}"}
        return {"id": self.call_id, "type": "function", "function": function}


class Choice:
    """One choice of an answer that is not streamed."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, Call] = {}
        self.prompt: list[TokenText] = []  # tokens of the prompt, if they have logprobs
        self.tokens: list[TokenText] = []
        self.token_ids: list[int] = []
        self.finish: FinishEvent | None = None

    def add(self, event: OutputEvent) -> None:
        if isinstance(event, TextEvent):
            self.texts.append(event.text)
            self.token_ids.extend(event.token_ids)
            if event.logprobs is not None:  # num_tokens is 0 for an echoed prompt
                (self.tokens if event.num_tokens else self.prompt).extend(event.logprobs)
        elif isinstance(event, ReasoningEvent):
            self.reasoning.append(event.text)
        elif isinstance(event, ToolCallEvent):
            if event.index not in self.calls:
                self.calls[event.index] = Call(event.call_id or "", event.name or "", [])
            self.calls[event.index].arguments.append(event.arguments)
        else:
            self.finish = event

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def mean_logprob(self) -> float:
        if not self.tokens:
            return -math.inf
        return sum(token.logprob for token in self.tokens) / len(self.tokens)

    def ending(self, named_tool: bool = False) -> dict[str, Any]:
        return ending_body(self.finish, bool(self.calls), named_tool)


class Collected:
    """All choices of an answer that is not streamed."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [Choice() for _ in range(num_choices)]

    def add(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            self.choices[event.choice].add(event)


async def collect(pump: EventPump, num_choices: int) -> Collected:
    """Wait for the complete answer and collect its choices. Raises if the stream failed."""
    collected = Collected(num_choices)
    await pump.wait_whole(collected.add)
    return collected


def ending_body(
    finish: FinishEvent | None, has_calls: bool = False, named_tool: bool = False
) -> dict[str, Any]:
    """The fields about the end of a choice. If the choice has tool calls, its finish reason is
    `tool_calls`. But if the client forced the call of a named tool, the reason is `stop`, as at
    OpenAI.
    """
    if finish is None:
        return {"finish_reason": None}
    reason = finish.reason
    if reason != "length":
        reason = "tool_calls" if has_calls and not named_tool else "stop"
    # vLLM and SGLang have different names for what ended the choice.
    stop = finish.stop_reason
    return {"finish_reason": reason, "stop_reason": stop, "matched_stop": stop}


def chat_body(
    envelope: Envelope,
    collected: Collected,
    usage: UsageEvent,
    *,
    tokens: TokenFields = NO_FIELDS,
    named_tool: bool = False,
    metadata: dict[str, str] | None = None,
    reports: Mapping[str, Any] = NOTHING,
    prompt_ids: Sequence[int] | None = None,
    interp: dict[str, Any] | None = None,
) -> bytes:
    choices = []
    for index, choice in enumerate(collected.choices):
        logprobs = chat_logprobs(tokens.answer(choice.tokens)) if tokens.has_logprobs else None
        choices.append(
            {"index": index, "message": chat_message(choice), "logprobs": logprobs}
            | choice.ending(named_tool)
            | {"token_ids": choice.token_ids if tokens.has_ids else None}
        )
    # vLLM's clients read the two fields of the prompt even if they are null.
    of_prompt = {
        "prompt_logprobs": tokens.prompt_logprobs(collected.choices[0].prompt),
        "prompt_token_ids": prompt_ids if tokens.has_ids else None,
    }
    more = of_prompt if interp is None else of_prompt | {"interp": interp}
    return _whole(envelope, "chat.completion", choices, usage, metadata, reports, more)


def chat_message(choice: Choice) -> dict[str, Any]:
    """The message object of a choice. Tool calls and reasoning are omitted if there are none.
    Reasoning is sent as `reasoning_content` and as `reasoning`, because clients use both names.
    """
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [call.body() for _, call in sorted(choice.calls.items())]
    if choice.reasoning:
        message["reasoning_content"] = message["reasoning"] = "".join(choice.reasoning)
    return message


def completion_body(
    envelope: Envelope,
    choices: Sequence[Choice],
    usage: UsageEvent,
    *,
    tokens: TokenFields = NO_FIELDS,
    metadata: dict[str, str] | None = None,
    reports: Mapping[str, Any] = NOTHING,
    prompts: Sequence[Sequence[int] | None] = (None,),
    interp: dict[str, Any] | None = None,
) -> bytes:
    """The answer of `/v1/completions`. `prompts` has the token ids of each prompt."""
    bodies = []
    for index, choice in enumerate(choices):
        shown = tokens.echo(choice.prompt) + tokens.answer(choice.tokens)
        prompt = prompts[index * len(prompts) // len(choices)]
        bodies.append(
            {
                "index": index,
                "text": choice.text,
                "logprobs": legacy_logprobs(shown, 0) if tokens.has_logprobs else None,
            }
            | choice.ending()
            | {
                "token_ids": choice.token_ids if tokens.has_ids else None,
                "prompt_logprobs": tokens.prompt_logprobs(choice.prompt),
                "prompt_token_ids": prompt if tokens.has_ids else None,
            }
        )
    more = {} if interp is None else {"interp": interp}
    return _whole(envelope, "text_completion", bodies, usage, metadata, reports, more)


def _whole(
    envelope: Envelope,
    kind: str,
    choices: list[dict[str, Any]],
    usage: UsageEvent,
    metadata: dict[str, str] | None,
    reports: Mapping[str, Any],
    of_prompt: Mapping[str, Any] = NOTHING,
) -> bytes:
    body = envelope.fields(kind) | {"choices": choices, "usage": usage_body(usage), **of_prompt}
    if metadata:
        body["metadata"] = metadata
    return _encode({**body, **reports})


class _ChunkStream:
    """Base class of chunk streams. In each chunk, `head` is the encoded bytes before the choice,
    and `tail` those after it.
    """

    def __init__(self, envelope: Envelope, kind: str, include_usage: bool) -> None:
        self.head = b"data: " + _encode(envelope.fields(kind))[:-1] + b',"choices":['
        self.tail = b"]," + END_OF_CHUNK if include_usage else b"]}\n\n"
        self._include_usage = include_usage

    def closing(self, usage: UsageEvent) -> bytes:
        if not self._include_usage:
            return DONE
        return self.head + b'],"usage":' + _encode(usage_body(usage)) + b"}\n\n" + DONE

    def failure(self, error: EngineError) -> bytes:
        return error_event(error)


class ChatStream(_ChunkStream):
    """Chunks of `/v1/chat/completions`. The first chunk of each choice has only the role."""

    def __init__(
        self, envelope: Envelope, num_choices: int, include_usage: bool, named_tool: bool = False
    ) -> None:
        super().__init__(envelope, "chat.completion.chunk", include_usage)
        self._before = [
            self.head + b'{"index":%d,"delta":{' % index for index in range(num_choices)
        ]
        self._after = b'},"logprobs":null,"finish_reason":null}' + self.tail
        self._named_tool = named_tool
        self.opens_with_null = False  # the content of the first chunk, as in llama.cpp
        # For each choice, maps the index of each tool call to whether the call has arguments yet.
        self._calls: list[dict[int, bool]] = [{} for _ in range(num_choices)]

    def blank(self, choice: int) -> bytes:
        """A chunk without text, to which fields can be added."""
        return self._before[choice] + self._after

    def opening(self) -> bytes:
        content = b"null" if self.opens_with_null else b'""'
        role = b'"role":"assistant","content":' + content
        return b"".join(before + role + self._after for before in self._before)

    def chunk(self, event: OutputEvent) -> bytes:
        before = self._before[event.choice]
        if isinstance(event, TextEvent):
            if event.logprobs:
                logprobs = _encode(chat_logprobs(event.logprobs))
                after = b'},"logprobs":' + logprobs + b',"finish_reason":null}' + self.tail
                return before + b'"content":' + _encode(event.text) + after
            if not event.text:
                return b""
            return before + b'"content":' + _encode(event.text) + self._after
        if isinstance(event, ReasoningEvent):
            text = _encode(event.text)
            return before + b'"reasoning_content":' + text + b',"reasoning":' + text + self._after
        if isinstance(event, ToolCallEvent):
            return self._call(event)
        ended = self.end_call(event.choice)
        ending = _encode(self.ending(event))[1:]
        return ended + before + b'},"logprobs":null,' + ending + self.tail

    def ending(self, event: FinishEvent) -> dict[str, Any]:
        return ending_body(event, bool(self._calls[event.choice]), self._named_tool)

    def _call(self, event: ToolCallEvent) -> bytes:
        calls = self._calls[event.choice]
        function: dict[str, Any] = {"arguments": event.arguments}
        if event.index in calls:
            if not event.arguments:
                return b""
            calls[event.index] = True
            return self._call_delta(event.choice, {"index": event.index, "function": function})
        ended = self.end_call(event.choice)
        calls[event.index] = bool(event.arguments)
        delta = {
            "index": event.index,
            "id": event.call_id,
            "type": "function",
            "function": {"name": event.name} | function,
        }
        return ended + self._call_delta(event.choice, delta)

    def end_call(self, choice: int) -> bytes:
        """A chunk that sends `{}` as the arguments of the previous tool call, if that call had
        none. Otherwise returns no bytes.
        """
        calls = self._calls[choice]
        last = next(reversed(calls), None)
        if last is None or calls[last]:
            return b""
        calls[last] = True
        return self._call_delta(choice, {"index": last, "function": {"arguments": "{}"}})

    def _call_delta(self, choice: int, delta: dict[str, Any]) -> bytes:
        return self._before[choice] + b'"tool_calls":' + _encode([delta]) + self._after


class CompletionStream(_ChunkStream):
    """Chunks of `/v1/completions`."""

    def __init__(self, envelope: Envelope, num_choices: int, include_usage: bool) -> None:
        super().__init__(envelope, "text_completion", include_usage)
        self._before = [self.head + b'{"index":%d,"text":' % index for index in range(num_choices)]
        self._after = b',"logprobs":null,"finish_reason":null}' + self.tail
        self.offsets = [0] * num_choices

    def blank(self, choice: int) -> bytes:
        return self._before[choice] + b'""' + self._after

    def opening(self) -> bytes:
        return b""

    def chunk(self, event: OutputEvent) -> bytes:
        before = self._before[event.choice]
        if isinstance(event, FinishEvent):
            return before + b'"","logprobs":null,' + _encode(ending_body(event))[1:] + self.tail
        if not isinstance(event, TextEvent):
            return b""  # completions have no reasoning and no tool calls
        if event.logprobs:
            return before + _encode(event.text) + self._logprobs(event)
        if not event.text:
            return b""
        return before + _encode(event.text) + self._after

    def _logprobs(self, event: TextEvent) -> bytes:
        assert event.logprobs is not None
        body = legacy_logprobs(event.logprobs, self.offsets[event.choice])
        self.offsets[event.choice] += sum(map(num_characters, event.logprobs))
        return b',"logprobs":' + _encode(body) + b',"finish_reason":null}' + self.tail
