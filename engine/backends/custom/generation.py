"""One request on the frontend: token deltas in, typed events out.

The frontend owns text: it detokenizes whole characters, finds stop strings and tells the engine to
forget a choice that met one. Exactly one ending per choice, then one `UsageEvent`; or an
`EngineError`.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator

from engine.backends.custom.echo import Echo
from engine.backends.custom.prompts import Prepared
from engine.backends.custom.text import TextModel
from engine.core.errors import EngineError, InferenceError, error_from_code
from engine.core.interfaces.backend import (
    Event,
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
    TopLogprob,
    UsageEvent,
)
from engine.core.interfaces.request import (
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from engine.core.parsing.pieces import Piece, ReasoningPiece, TextPiece
from engine.core.utils.detokenizer import Detokenizer

# More deltas than this waiting for one reader are merged, so that a slow reader catches up.
MAX_BACKLOG = 8


class _Reader:
    """One choice's tokens to pieces: whole characters, stop strings cut, then what they mean."""

    def __init__(self, text: TextModel, params: SamplingParams, prepared: Prepared) -> None:
        self._detokenizer = Detokenizer(
            text.tokenizer, params.stop, continuation=prepared.continuation, shown=prepared.shown
        )
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._parser = None if prepared.new_parser is None else prepared.new_parser()

    def read(self, token_ids: tuple[int, ...], ends: bool) -> list[Piece]:
        self._num_tokens += len(token_ids)
        text = self._detokenizer.push(token_ids, self._num_tokens > self._min_tokens)
        ends = ends or self.stopped is not None
        if ends:
            text += self._detokenizer.flush()
        if self._parser is None:
            return [TextPiece(text)]
        pieces = self._parser.push(text)
        return pieces + self._parser.flush() if ends else pieces

    @property
    def stopped(self) -> str | None:
        return self._detokenizer.stopped

    @property
    def in_reasoning(self) -> bool:
        return self._parser is not None and self._parser.in_reasoning

    @property
    def num_calls(self) -> int:
        return 0 if self._parser is None else self._parser.num_calls


class Generation:
    """Collects a request's deltas and turns them into events."""

    def __init__(
        self,
        request: GenerateRequest,
        text: TextModel,
        prepared: Prepared,
        forget: Callable[[int | None], None],
    ) -> None:
        self.request = request
        self._text = text
        self._forget = forget  # tells the engine to drop one choice, or all
        self._open = {
            choice: _Reader(text, request.params, prepared) for choice in range(request.params.n)
        }
        self._echo = None if prepared.echo is None else Echo(prepared.echo, request)
        self._may_merge = not request.params.stop and prepared.new_parser is None
        self._arrived: deque[TokenDelta | EngineError] = deque()
        self._wake = asyncio.Event()
        self._num_tokens = 0
        self._num_reasoning = 0
        self._num_cached = 0
        self._queue_s = 0.0
        self._prefill_s = 0.0
        self._first_token_at: float | None = None

    def deliver(self, item: TokenDelta | EngineError) -> None:
        """Called by the link, in order: a delta of this request, or the engine's failure."""
        self._arrived.append(item)
        self._wake.set()

    async def events(self) -> AsyncGenerator[Event, None]:
        try:
            while self._open:
                await self._wake.wait()
                self._wake.clear()
                while self._arrived:
                    for event in self._take(self._next_item()):
                        yield event
            yield self._usage()
        finally:
            if self._open:
                self._forget(None)

    def _next_item(self) -> TokenDelta | EngineError:
        """The oldest arrival, merged with its followers of the same choice when too many wait.

        Not where a stop string may cut, since tokens behind it must be neither shown nor counted;
        nor where reasoning may end, since its tokens are counted apart.
        """
        item = self._arrived.popleft()
        while self._may_merge and len(self._arrived) > MAX_BACKLOG and isinstance(item, TokenDelta):
            follower = self._arrived[0]
            if item.finish_reason or not isinstance(follower, TokenDelta):
                break
            if follower.choice != item.choice:
                break
            self._arrived.popleft()
            item = _merged(item, follower)
        return item

    def _take(self, item: TokenDelta | EngineError) -> Iterator[Event]:
        if isinstance(item, EngineError):
            raise item
        if item.choice not in self._open:
            return  # it met a stop string while more tokens were on their way
        if item.finish_reason == "error":
            code = item.error_code or InferenceError.code
            raise error_from_code(code, item.error_message or "The request failed.")
        if item.finish_reason == "abort":
            raise InferenceError("The request was aborted.")
        for delta in (item,) if self._echo is None else self._echo.ready(item):
            if delta.choice not in self._open:
                continue  # it met a stop string in a delta that was kept before this one
            self._count(delta)
            if self._echo is not None and self._echo.is_due(delta):
                yield TextEvent(delta.choice, self._echo.text, 0, self._echoed_logprobs())
            yield from self._decode(delta)

    def _count(self, delta: TokenDelta) -> None:
        if delta.token_ids and self._first_token_at is None:
            self._first_token_at = time.monotonic()
            self._queue_s, self._prefill_s = delta.queue_s, delta.prefill_s
            self._num_cached = delta.num_cached
        self._num_tokens += len(delta.token_ids)

    def _decode(self, delta: TokenDelta) -> Iterator[Event]:
        reader = self._open[delta.choice]
        ids = delta.token_ids
        # A stop id that the client named is no part of the text; an end-of-text id has none anyway.
        visible = ids[:-1] if delta.stop_token_id is not None else ids
        was_reasoning = reader.in_reasoning
        pieces = reader.read(visible, ends=delta.finish_reason is not None)
        if was_reasoning or reader.in_reasoning:
            self._num_reasoning += len(ids)
        yield from self._events(delta, pieces)
        if delta.finish_reason is None and reader.stopped is None:
            return
        del self._open[delta.choice]
        if delta.finish_reason is None:
            self._forget(delta.choice)
        yield self._finish(delta, reader)

    def _events(self, delta: TokenDelta, pieces: list[Piece]) -> Iterator[Event]:
        """In order; exactly one of them counts the tokens."""
        choice, counted = delta.choice, False
        for piece in pieces:
            if isinstance(piece, TextPiece):
                yield self._text_event(delta, piece.text, counted)
                counted = True
            elif isinstance(piece, ReasoningPiece):
                yield ReasoningEvent(choice, piece.text)
            else:
                yield ToolCallEvent(choice, piece.index, piece.arguments, piece.call_id, piece.name)
        if not counted:
            yield self._text_event(delta, "", counted)

    def _text_event(self, delta: TokenDelta, text: str, counted: bool) -> TextEvent:
        if counted:
            return TextEvent(delta.choice, text, 0)
        ids = delta.token_ids
        return TextEvent(delta.choice, text, len(ids), self._logprobs(delta), ids)

    def _finish(self, delta: TokenDelta, reader: "_Reader") -> FinishEvent:
        if reader.stopped is not None:
            return FinishEvent(delta.choice, "stop", reader.stopped)
        if delta.finish_reason == "length":
            return FinishEvent(delta.choice, "length")
        if reader.num_calls:
            return FinishEvent(delta.choice, "tool_calls")
        named = delta.stop_token_id in self.request.params.stop_token_ids
        return FinishEvent(delta.choice, "stop", delta.stop_token_id if named else None)

    def _logprobs(self, delta: TokenDelta) -> tuple[TokenText, ...] | None:
        if delta.logprobs is None:
            return None
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        return tuple(self._token_text(token, logprobs) for token, logprobs in pairs)

    def _echoed_logprobs(self) -> tuple[TokenText, ...] | None:
        assert self._echo is not None
        if self._echo.scores is None:
            return None
        first, *others = self.request.prompt
        pairs = zip(others, self._echo.scores, strict=True)
        return (
            TokenText(*self._literal(first), math.nan),
            *(self._token_text(token, logprobs) for token, logprobs in pairs),
        )

    def _token_text(self, token_id: int, logprobs: TokenLogprobs) -> TokenText:
        text, raw = self._literal(token_id)
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        return TokenText(
            text, raw, logprobs.logprob, tuple(TopLogprob(*self._literal(i), lp) for i, lp in top)
        )

    def _literal(self, token_id: int) -> tuple[str, bytes]:
        raw = self._text.tokenizer.token_literal(token_id)
        return raw.decode("utf-8", "replace"), raw

    def _usage(self) -> UsageEvent:
        now = time.monotonic()
        return UsageEvent(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self._num_tokens,
            cached_tokens=self._num_cached,
            queue_s=self._queue_s,
            prefill_s=self._prefill_s,
            decode_s=now - self._first_token_at if self._first_token_at is not None else 0.0,
            reasoning_tokens=self._num_reasoning,
        )


def _merged(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    return TokenDelta(
        first.request_id,
        first.choice,
        first.token_ids + second.token_ids,
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_token_id=second.stop_token_id,
        num_cached=first.num_cached,
        queue_s=first.queue_s,
        prefill_s=first.prefill_s,
        error_code=second.error_code,
        error_message=second.error_message,
        prompt_logprobs=first.prompt_logprobs,
    )
