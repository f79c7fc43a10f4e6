"""Converts the chunks of another server's answer to typed events.

Each choice gets one finish event. After all of them follows one `UsageEvent`. If the answer ends
before all choices have finished, it has failed.
"""

import math
import secrets
import time
from collections.abc import Sequence

import msgspec

from engine.backends.base import EventSink
from engine.backends.openai.failures import error_in_stream, unavailable
from engine.backends.openai.wire import (
    WireCall,
    WireChoice,
    WireChunk,
    WireLogprobs,
    WireToken,
    WireTop,
    WireUsage,
    decode_chunk,
)
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
    TopLogprob,
    UsageEvent,
)
from engine.core.interfaces.request import SamplingParams
from engine.core.text.stop_strings import StopStrings

# Finish reasons that mean failure.
_FAILED = frozenset({"abort", "error", "cancelled"})
_CALLS = frozenset({"tool_calls", "function_call"})
_UNKNOWN_LOGPROB = -9999.0


class Expected(msgspec.Struct, frozen=True):
    """The parts of a request that are needed to read its answer."""

    params: SamplingParams
    # Stop strings that we match ourselves, because the server does not accept that many.
    own_stops: tuple[str, ...] = ()
    echo: str | None = None  # the prompt's text, if it must be sent as the first event
    scores_prompt: bool = False  # the answer starts with the prompt and its logprobs
    num_prompt: int | None = None  # prompt tokens, if known in advance
    grammar_param: str | None = None


class _Choice:
    """State of one choice."""

    def __init__(self, own_stops: tuple[str, ...]) -> None:
        self.stops = StopStrings(own_stops) if own_stops else None
        self.calls: dict[int, str] = {}  # our index -> the call's id
        self.indexes: dict[int, int] = {}  # the server's index -> ours
        self.is_open = True

    def call_index(self, call: WireCall) -> tuple[int, bool]:
        """Our index of a tool call, and whether `call` is its first part.

        Some servers send no index, or the same index for all calls. Then a new id means a new call.
        """
        theirs = 0 if call.index is None else call.index
        known = self.indexes.get(theirs)
        is_other = bool(call.id) and known is not None and self.calls[known] != call.id
        has_name = call.function is not None and bool(call.function.name)
        if known is not None and not (is_other and has_name):
            return known, False
        self.indexes[theirs] = len(self.calls)
        return len(self.calls), True


class AnswerReader:
    """Reads one answer from its first chunk to its usage. Each event goes to `sink` at once."""

    def __init__(self, expected: Expected, sink: EventSink, began_at: float) -> None:
        """`began_at` is the request's start (`time.monotonic`)."""
        self._expected = expected
        self._sink = sink
        self._params = expected.params
        self._choices = [_Choice(expected.own_stops) for _ in range(expected.params.n)]
        self._num_open = len(self._choices)
        self._usage: WireUsage | None = None
        self._num_tokens = 0
        self._has_logprobs = False
        self._began_at = began_at
        self._first_at: float | None = None
        if expected.echo is not None and not expected.scores_prompt:
            for index in range(len(self._choices)):
                sink(TextEvent(index, expected.echo, 0))

    @property
    def is_finished(self) -> bool:
        """Whether all choices have ended. The usage may still follow."""
        return self._num_open == 0

    @property
    def was_cut(self) -> bool:
        """Whether all choices have ended, at least one of them because we found a stop string that
        the server does not know. Then the rest of the answer is not needed.
        """
        return self.is_finished and any(
            each.stops is not None and each.stops.stopped is not None for each in self._choices
        )

    def push(self, data: bytes) -> None:
        """Process one chunk, or a whole answer. Raises an `EngineError`."""
        try:
            chunk = decode_chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise unavailable(f"it sent what can't be understood: {error}") from None
        if chunk.error or chunk.object == "error":
            raise self._failure(chunk)
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices or ():
            if chunk.verbose is not None and choice.stop_reason is None:
                choice.stop_reason = chunk.verbose.stopping_word
            if 0 <= choice.index < len(self._choices):
                self._take(choice, self._choices[choice.index])

    def end(self) -> UsageEvent:
        """Finish after the last chunk. Raises if the answer is incomplete."""
        if self._num_open:
            raise unavailable("its answer broke off")
        usage = self._usage or WireUsage()
        cached = usage.prompt_tokens_details
        details = usage.completion_tokens_details
        now = time.monotonic()
        first_at = now if self._first_at is None else self._first_at
        num_prompt, num_tokens = usage.prompt_tokens, usage.completion_tokens
        return UsageEvent(
            prompt_tokens=(self._expected.num_prompt or 0) if num_prompt is None else num_prompt,
            completion_tokens=self._num_tokens if num_tokens is None else num_tokens,
            cached_tokens=0 if cached is None else cached.cached_tokens or 0,
            prefill_s=first_at - self._began_at,
            decode_s=now - first_at,
            reasoning_tokens=0 if details is None else details.reasoning_tokens or 0,
        )

    def _failure(self, chunk: WireChunk) -> Exception:
        told = chunk.error or {"message": chunk.message}
        return error_in_stream(told, self._expected.grammar_param)

    def _take(self, wire: WireChoice, choice: _Choice) -> None:
        if not choice.is_open:
            return  # we ended this choice at a stop string that the server does not know
        delta = wire.delta or wire.message
        text = wire.text
        logprobs = wire.logprobs
        if delta is not None:
            text = delta.content or delta.refusal
            reasoning = delta.reasoning_content or delta.reasoning
            if reasoning:
                self._sink(ReasoningEvent(wire.index, reasoning))
            for call in delta.tool_calls or ():
                self._call(wire.index, choice, call)
            if not text and (reasoning or delta.tool_calls):
                self._count(wire, 1)
        if self._expected.scores_prompt:
            text, logprobs = self._echoed(wire)
        if text or logprobs is not None or wire.token_ids:
            self._text(wire, choice, text or "", logprobs)
        if wire.finish_reason is not None:
            self._finish(wire, choice)

    def _count(self, wire: WireChoice, num_tokens: int) -> None:
        """Count tokens of reasoning or of a call."""
        self._note(num_tokens)
        self._sink(TextEvent(wire.index, "", num_tokens))

    def _note(self, num_tokens: int) -> None:
        if self._first_at is None:
            self._first_at = time.monotonic()
        self._num_tokens += num_tokens

    def _text(
        self, wire: WireChoice, choice: _Choice, text: str, wire_logprobs: WireLogprobs | None
    ) -> None:
        """Send a text event. A chunk without logprobs and token ids counts as one token; the usage
        at the end has the correct number.
        """
        logprobs: tuple[TokenText, ...] | None = None
        if self._params.logprobs is not None:
            if wire_logprobs is not None:
                logprobs = token_texts(wire_logprobs, self._params.logprobs)
            self._has_logprobs |= bool(logprobs)
            if text and not self._has_logprobs:
                raise InvalidRequestError(
                    "logprobs can't be used here: the model's server gives none.",
                    param="logprobs",
                    code="unsupported_parameter",
                )
        ids = tuple(wire.token_ids or _ids_of(wire_logprobs))
        num_tokens = len(ids or logprobs or ()) or (1 if text else 0)
        self._note(num_tokens)
        if choice.stops is None:
            self._sink(TextEvent(wire.index, text, num_tokens, logprobs, ids))
            return
        shown = choice.stops.push(text)
        self._sink(TextEvent(wire.index, shown, num_tokens, logprobs, ids))
        if choice.stops.stopped is not None:
            self._close(choice, FinishEvent(wire.index, "stop", choice.stops.stopped))

    def _call(self, index: int, choice: _Choice, call: WireCall) -> None:
        position, is_first = choice.call_index(call)
        function = call.function
        arguments = "" if function is None else function.arguments or ""
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        if not is_first:
            if arguments:
                self._sink(ToolCallEvent(index, position, arguments))
            return
        if function is None or not function.name:
            raise unavailable("it called a tool without a name")
        call_id = call.id or f"call_{secrets.token_hex(12)}"
        choice.calls[position] = call_id
        self._sink(ToolCallEvent(index, position, arguments, call_id, function.name))

    def _finish(self, wire: WireChoice, choice: _Choice) -> None:
        if not choice.is_open:
            return
        if choice.stops is not None and (held := choice.stops.flush()):
            self._sink(TextEvent(wire.index, held, 0))
        reason = wire.finish_reason
        if reason in _FAILED:
            raise unavailable("its answer broke off")
        if reason == "length":
            self._close(choice, FinishEvent(wire.index, "length"))
        elif choice.calls or reason in _CALLS:
            self._close(choice, FinishEvent(wire.index, "tool_calls"))
        elif reason == "content_filter":
            self._close(choice, FinishEvent(wire.index, "stop", "content_filter"))
        else:
            self._close(choice, FinishEvent(wire.index, "stop", self._stop_reason(wire)))

    def _stop_reason(self, wire: WireChoice) -> str | int | None:
        """The stop string or stop token id that the server reports. None if the client did not set
        it: some servers report the EOS id.
        """
        told = wire.stop_reason if wire.stop_reason is not None else wire.matched_stop
        is_named = told in (self._params.stop if isinstance(told, str) else ())
        return told if is_named or told in self._params.stop_token_ids else None

    def _close(self, choice: _Choice, event: FinishEvent) -> None:
        choice.is_open = False
        self._num_open -= 1
        self._sink(event)

    def _echoed(self, wire: WireChoice) -> tuple[str, WireLogprobs | None]:
        """Send the prompt, which the answer starts with, and its logprobs as an event. Returns the
        generated text and its logprobs.
        """
        text, logprobs = wire.text or "", wire.logprobs
        tokens = logprobs.tokens if logprobs is not None else None
        num_prompt = self._usage.prompt_tokens if self._usage is not None else None
        if logprobs is None or tokens is None or num_prompt is None or num_prompt > len(tokens):
            raise InvalidRequestError(
                "echo with logprobs can't be used here: the model's server does not score prompts.",
                param="echo",
                code="unsupported_parameter",
            )
        prompt, rest = _columns(logprobs, 0, num_prompt), _columns(logprobs, num_prompt, None)
        cut = len("".join(tokens[:num_prompt]))
        if self._expected.echo is not None and text.startswith(self._expected.echo):
            cut = len(self._expected.echo)
        elif logprobs.text_offset is not None and num_prompt < len(logprobs.text_offset):
            cut = logprobs.text_offset[num_prompt] - logprobs.text_offset[0]
        top = self._params.logprobs or 0
        self._has_logprobs = True
        self._sink(TextEvent(wire.index, text[:cut], 0, token_texts(prompt, top)))
        return text[cut:], rest


def token_texts(logprobs: WireLogprobs, num_top: int) -> tuple[TokenText, ...]:
    """Tokens with logprobs, from the format of chats or of completions. The first token of a prompt
    has no logprob and gets NaN.
    """
    if logprobs.content is not None:
        return tuple(_chat_token(each, num_top) for each in logprobs.content)
    tokens = logprobs.tokens or []
    chosen: Sequence[float | None] = logprobs.token_logprobs or [None] * len(tokens)
    tops: Sequence[dict[str, float | None] | None] = logprobs.top_logprobs or [None] * len(tokens)
    return tuple(
        TokenText(
            token,
            token.encode("utf-8", "replace"),
            math.nan if logprob is None else logprob,
            _best([WireTop(text, value) for text, value in (top or {}).items()], num_top),
        )
        for token, logprob, top in zip(tokens, chosen, tops, strict=False)
    )


def _ids_of(logprobs: WireLogprobs | None) -> list[int]:
    """The token ids. Empty if the server does not send the ids of all tokens."""
    tokens = [] if logprobs is None else logprobs.content or []
    ids = [each.id for each in tokens if each.id is not None]
    return ids if len(ids) == len(tokens) else []


def _chat_token(token: WireToken, num_top: int) -> TokenText:
    logprob = math.nan if token.logprob is None else token.logprob
    top = _best(token.top_logprobs or [], num_top)
    return TokenText(token.token, _bytes(token), logprob, top)


def _best(tops: list[WireTop], count: int) -> tuple[TopLogprob, ...]:
    made = [
        TopLogprob(
            each.token, _bytes(each), _UNKNOWN_LOGPROB if each.logprob is None else each.logprob
        )
        for each in tops
    ]
    return tuple(sorted(made, key=lambda each: -each.logprob)[:count])


def _bytes(token: WireToken | WireTop) -> bytes:
    if token.bytes is not None and all(0 <= each <= 255 for each in token.bytes):
        return bytes(token.bytes)
    return token.token.encode("utf-8", "replace")


def _columns(logprobs: WireLogprobs, start: int, stop: int | None) -> WireLogprobs:
    part = slice(start, stop)
    return WireLogprobs(
        tokens=(logprobs.tokens or [])[part],
        token_logprobs=(logprobs.token_logprobs or [])[part] or None,
        top_logprobs=(logprobs.top_logprobs or [])[part] or None,
    )
