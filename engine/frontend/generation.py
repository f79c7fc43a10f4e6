"""One generation request on the frontend. It receives token deltas from the engine and turns them
into typed events.

If a choice reaches a stop string, its text is cut, and the engine is told to abort the choice. Each
choice ends with exactly one `FinishEvent`. After the last choice comes one `UsageEvent`. If the
engine fails, an `EngineError` is raised instead. The caller either iterates over the events or
passes a function to `feed`, which is called when deltas arrive. This avoids a task switch.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from msgspec.structs import replace

from engine.backends.base import EventSink, GeneratedFeed
from engine.core.errors import EngineError, InferenceError, error_from_code
from engine.core.interfaces.backend import (
    Event,
    FinishEvent,
    PromptProgress,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
    TopLogprob,
    UsageEvent,
)
from engine.core.interfaces.request import (
    GenerateRequest,
    RecordedRequest,
    RequestNotes,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from engine.core.parsing.pieces import Piece, ReasoningPiece, TextPiece
from engine.core.text.tokenizer import Detokenizer
from engine.frontend.echo import Echo, echoed_tokens
from engine.frontend.prompts import Prepared
from engine.frontend.request_recovery import Engine
from engine.frontend.text_model import TextModel

# If more deltas than this wait for a slow caller, they are merged, so that the caller can catch up.
MAX_BACKLOG = 8


class TextReader:
    """Turns the tokens of one choice into text, which is cut at stop strings. If there is a parser,
    it separates reasoning and tool calls from the answer.
    """

    def __init__(self, text: TextModel, params: SamplingParams, prepared: Prepared) -> None:
        self._detokenizer = Detokenizer(
            text.tokenizer,
            params.stop,
            skip_special=params.skip_special_tokens,
            continuation=prepared.continuation,
            shown=prepared.shown,
            patterns=prepared.stop_patterns,
        )
        self._decode = self._detokenizer.push
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._parser = None if prepared.new_parser is None else prepared.new_parser()
        self._parse = None if self._parser is None else self._parser.push
        # True if there is no parser, because the whole output is plain text.
        self.is_plain = self._parser is None
        # The detokenizer alone. None if something besides the engine may end the output, or parses
        # it.
        is_unbounded = self.is_plain and not (params.stop or prepared.stop_patterns)
        self.push = self._decode if is_unbounded else None

    def text(self, token_ids: tuple[int, ...], ends: bool) -> str:
        self._num_tokens += len(token_ids)
        text = self._decode(token_ids, self._num_tokens > self._min_tokens)
        if ends or self.stopped is not None:
            text += self._detokenizer.flush()
        return text

    def pieces(self, token_ids: tuple[int, ...], ends: bool) -> list[Piece]:
        assert self._parser is not None and self._parse is not None
        pieces = self._parse(self.text(token_ids, ends))
        return pieces + self._parser.flush() if ends or self.stopped is not None else pieces

    @property
    def stopped(self) -> str | None:
        return self._detokenizer.stopped

    @property
    def in_reasoning(self) -> bool:
        return self._parser is not None and self._parser.in_reasoning

    @property
    def num_calls(self) -> int:
        return 0 if self._parser is None else self._parser.num_calls


class Generation(GeneratedFeed):
    """A submitted request. It collects the deltas of the request and turns them into events."""

    def __init__(
        self,
        request: GenerateRequest,
        text: TextModel,
        prepared: Prepared,
        engine: Engine,
        on_progress: Callable[[PromptProgress], None] | None = None,
        notes: RequestNotes | None = None,
        on_captured: Callable[[bytes], None] | None = None,
        on_wait: Callable[[bool], None] | None = None,
    ) -> None:
        super().__init__()
        self.request = request
        self._text = text
        self.engine = engine
        self._prepared = prepared
        self._open = set(range(request.params.n))  # choices that have not ended
        self._is_cut = False  # whether the engine was told to abort a choice, or all of them
        # The reader of each choice, created when the choice's first tokens arrive.
        self._readers: dict[int, TextReader] = {}
        self._echo = None if prepared.echo is None else Echo(prepared.echo, request)
        can_stop = bool(request.params.stop or prepared.stop_patterns)
        reads = request.interp is not None and request.interp.reads
        self._may_merge = not (can_stop or reads) and prepared.new_parser is None
        self._arrived: deque[TokenDelta | EngineError] = deque()
        self._wake = asyncio.Event()
        self._sink: EventSink | None = None
        self._failure: BaseException | None = None
        self._num_tokens = self._num_reasoning = self._num_cached = 0
        self._num_drafted = self._num_accepted = 0
        self._queue_s = 0.0
        self._prefill_s = 0.0
        self._first_token_at: float | None = None
        # For `_pass_on`: detokenizers of choices that only the engine ends, if nothing else reads.
        self._pushes: dict[int, Callable[[tuple[int, ...]], str]] = {}
        self._has_pushes = on_progress is None and prepared.echo is None
        self._on_progress = on_progress
        self._notes = notes
        self._on_captured = on_captured
        self._on_wait = on_wait  # None once the request has begun
        self._pieces: list[bytes] = []  # of what the request read
        self._recorded: RecordedRequest | None = None
        self.on_released: Callable[[], None] = lambda: None  # may be called twice
        self._num_processed = -1  # of the prompt, as last reported; -1: nothing was reported

    def record(self, recorded: RecordedRequest | None) -> None:
        """Add all tokens to `recorded` as they arrive."""
        self._recorded = recorded
        self._has_pushes = self._has_pushes and recorded is None

    def deliver(self, *items: TokenDelta | EngineError) -> None:
        """`EngineLink` calls this with the deltas of the request that arrived together, in order.
        If the engine fails, it calls this with the error.
        """
        if self._sink is not None and not self._arrived and self._pass_on(self._sink, items):
            return
        self._arrived.extend(items)
        if self._sink is None:
            self._wake.set()
        else:
            self._hand_on(self._sink)

    def _pass_on(self, sink: EventSink, items: Sequence[TokenDelta | EngineError]) -> bool:
        """Short cut for plain text in the middle of a choice, as most deltas are. Deltas of several
        steps become one event. Returns False, and does nothing, if a delta is of another kind.
        """
        first = items[0]
        if not isinstance(first, TokenDelta) or not is_plain(first):
            return False
        choice, ids = first.choice, first.token_ids
        push = self._pushes.get(choice)
        if push is None:
            return False
        for item in items[1:]:
            if not isinstance(item, TokenDelta) or item.choice != choice or not is_plain(item):
                return False
            ids += item.token_ids
        self._num_tokens += len(ids)
        try:
            sink(TextEvent(choice, push(ids), len(ids), None, ids))
        except Exception as error:  # as in `_hand_on`
            self._fail(error)
        return True

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._pushes.clear()
        self._wake.set()

    async def _read(self) -> AsyncGenerator[Event, None]:
        try:
            while self._open:
                await self._wake.wait()
                self._wake.clear()
                while self._arrived:
                    for event in self._take(self._next_item(MAX_BACKLOG)):
                        yield event
            yield self._usage()
        finally:
            self._release()

    async def feed(self, sink: EventSink) -> None:
        """Call `sink` with each event, directly from `deliver`. Returns when the request ends."""
        self._sink = sink
        self._wake.clear()  # from here on, `_wake` signals the end of the request
        self._hand_on(sink)
        try:
            await self._wake.wait()
            if self._failure is not None:
                raise self._failure
            sink(self._usage())
        finally:
            self._sink = None
            self._release()

    async def aclose(self) -> None:
        """End the request. If it still runs, the engine aborts it. This also works if no event was
        read. Safe to call twice.
        """
        await self._reading.aclose()
        self._release()

    def _release(self) -> None:
        if self._open:
            self._open.clear()
            self._forget(None)
        if self._is_cut and self._notes is not None:
            self.engine.leave(self.request.request_id, self._notes)
        self.engine.done(self.request.request_id)
        self.on_released()

    def _forget(self, choice: int | None) -> None:
        self._is_cut = True
        self.engine.forget(self.request.request_id, choice)

    def _hand_on(self, sink: EventSink) -> None:
        if self._failure is not None:
            return
        try:
            while self._arrived:
                for event in self._take(self._next_item(0)):
                    sink(event)
        # An error in one request must not reach `EngineLink`, which serves all requests. `feed`
        # raises the error instead.
        except Exception as error:
            self._fail(error)
        if not self._open:
            self._wake.set()

    def _next_item(self, max_backlog: int) -> TokenDelta | EngineError:
        """Removes and returns the oldest queued item. If more than `max_backlog` items are queued
        behind it, the next deltas of the same choice are merged into it.

        Deltas are not merged if the request has stop strings, because tokens after a stop string
        must be neither shown nor counted. They are not merged if the output is parsed, because
        reasoning tokens are counted separately, nor if some have pieces of what the request read.
        """
        item = self._arrived.popleft()
        if not self._may_merge or not isinstance(item, TokenDelta):
            return item
        run = [item]
        while len(self._arrived) > max_backlog:
            follower = self._arrived[0]
            is_alone = bool(run[-1].finish_reason or item.num_processed or item.begins)
            if is_alone or not isinstance(follower, TokenDelta):
                break
            if follower.choice != item.choice:
                break
            run.append(follower)
            self._arrived.popleft()
        return item if len(run) == 1 else merged(run)

    def _take(self, item: TokenDelta | EngineError) -> list[Event]:
        if isinstance(item, EngineError):
            raise item
        if item.timeline is not None and self._notes is not None:
            self._notes.add_timeline(item.timeline)
        if item.choice not in self._open:
            return []  # the choice already ended at a stop string; these tokens were in flight
        if item.finish_reason == "error":
            code = item.error_code or InferenceError.code
            message = item.error_message or "The request failed."
            raise error_from_code(code, message, item.retry_after)
        if item.finish_reason == "abort":
            raise InferenceError("The request was aborted.")
        if self._on_wait is not None:
            self._on_wait(False)
            self._on_wait = None
        if item.begins:
            return []
        if item.captured is not None:
            self._take_piece(item, item.captured)
            if item.finish_reason is None:
                return []
        if self._on_progress is not None and self._first_token_at is None:
            self._report(item, self._on_progress)
        if item.num_processed:
            return []
        if self._echo is None:
            return self._decode(item)
        return self._echoed(self._echo, item)

    def _take_piece(self, delta: TokenDelta, piece: bytes) -> None:
        """Add a piece of what the request read. An engine that died may have sent some before."""
        if not delta.captured_at:
            self._pieces.clear()
        self._pieces.append(piece)
        if delta.finish_reason is not None and self._on_captured is not None:
            self._on_captured(b"".join(self._pieces))
            self._pieces.clear()

    def _report(self, delta: TokenDelta, report: Callable[[PromptProgress], None]) -> None:
        """Report how much of the prompt is computed. The first report is about the cached tokens
        alone. With the first token, the whole prompt is computed.
        """
        total = len(self.request.prompt)
        if self._num_processed < 0:
            report(PromptProgress(total, delta.num_cached, delta.num_cached, 0.0))
            self._num_processed = delta.num_cached
        processed = delta.num_processed or total
        if processed > self._num_processed:
            report(PromptProgress(total, delta.num_cached, processed, delta.prefill_s))
            self._num_processed = processed

    def _echoed(self, echo: Echo, item: TokenDelta) -> list[Event]:
        events: list[Event] = []
        for delta in echo.ready(item):
            if delta.choice not in self._open:
                continue  # the choice ended at a stop string in an earlier delta
            if echo.is_due(delta):
                events.append(TextEvent(delta.choice, echo.text, 0, self._echoed_logprobs(echo)))
            events += self._decode(delta)
        return events

    def _decode(self, delta: TokenDelta) -> list[Event]:
        reader = self._reader(delta.choice)
        if self._recorded is not None:
            self._recorded.token_ids.setdefault(delta.choice, []).extend(delta.token_ids)
        ids, ends = delta.token_ids, delta.finish_reason is not None
        self._count(delta)
        # The stop token that ended the output is not part of the text.
        visible = ids[:-1] if delta.stop_token_id is not None else ids
        events: list[Event]
        if reader.is_plain:
            events = [self._text_event(delta, reader.text(visible, ends), counted=False)]
        else:
            was_reasoning = reader.in_reasoning
            events = self._events(delta, reader.pieces(visible, ends))
            if was_reasoning or reader.in_reasoning:
                self._num_reasoning += len(ids)
        if ends or reader.stopped is not None:
            self._open.remove(delta.choice)
            self._pushes.pop(delta.choice, None)
            if not ends:
                self._forget(delta.choice)
            events.append(self._finish(delta, reader))
        return events

    def _reader(self, choice: int) -> TextReader:
        reader = self._readers.get(choice)
        if reader is None:
            reader = TextReader(self._text, self.request.params, self._prepared)
            self._readers[choice] = reader
            if self._has_pushes and reader.push is not None:
                self._pushes[choice] = reader.push
        return reader

    def _count(self, delta: TokenDelta) -> None:
        if delta.token_ids and self._first_token_at is None:
            self._first_token_at = time.monotonic()
            self._queue_s, self._prefill_s = delta.queue_s, delta.prefill_s
            self._num_cached = delta.num_cached
        self._num_tokens += len(delta.token_ids)
        self._num_drafted += delta.num_drafted
        self._num_accepted += delta.num_accepted

    def _events(self, delta: TokenDelta, pieces: list[Piece]) -> list[Event]:
        """The events of one delta, in order. Exactly one of these events has the token count and
        the logprobs of the delta.
        """
        choice, counted = delta.choice, False
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, TextPiece):
                events.append(self._text_event(delta, piece.text, counted))
                counted = True
            elif isinstance(piece, ReasoningPiece):
                events.append(ReasoningEvent(choice, piece.text))
            else:
                events.append(
                    ToolCallEvent(choice, piece.index, piece.arguments, piece.call_id, piece.name)
                )
        if not counted:
            events.append(self._text_event(delta, "", counted))
        return events

    def _text_event(self, delta: TokenDelta, text: str, counted: bool) -> TextEvent:
        if counted:
            return TextEvent(delta.choice, text, 0)
        ids = delta.token_ids
        logprobs = None if delta.logprobs is None else self._logprobs(ids, delta.logprobs)
        return TextEvent(delta.choice, text, len(ids), logprobs, ids)

    def _finish(self, delta: TokenDelta, reader: TextReader) -> FinishEvent:
        if reader.stopped is not None:
            return FinishEvent(delta.choice, "stop", reader.stopped)
        if delta.finish_reason == "length":
            return FinishEvent(delta.choice, "length")
        if reader.num_calls:
            return FinishEvent(delta.choice, "tool_calls")
        named = delta.stop_token_id in self.request.params.stop_token_ids
        return FinishEvent(delta.choice, "stop", delta.stop_token_id if named else None)

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> tuple[TokenText, ...]:
        pairs = zip(token_ids, logprobs, strict=True)
        return tuple(self._token_text(token, each) for token, each in pairs)

    def _echoed_logprobs(self, echo: Echo) -> tuple[TokenText, ...] | None:
        if echo.scores is None:
            return None
        # The first token has no logprob, because nothing precedes it.
        logprobs = (TokenLogprobs(math.nan), *echo.scores)
        tokens = self._logprobs(self.request.prompt, logprobs)
        return tuple(echoed_tokens(echo.text, tokens))

    def _token_text(self, token_id: int, logprobs: TokenLogprobs) -> TokenText:
        text, raw = self._literal(token_id)
        ranked = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        top = tuple(TopLogprob(*self._literal(i), logprob, i) for i, logprob in ranked)
        return TokenText(
            text, raw, logprobs.logprob, top, token_id, in_text=self._is_shown(token_id)
        )

    def _is_shown(self, token_id: int) -> bool:
        if not self.request.params.skip_special_tokens or token_id in self._prepared.shown:
            return True
        return not self._text.tokenizer.is_special(token_id)

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
            num_revivals=self.engine.num_revivals(self.request.request_id),
            num_drafted=self._num_drafted,
            # A draft may go on behind a stop string, where the answer ends.
            num_accepted=min(self._num_accepted, self._num_tokens),
            has_prediction=bool(self.request.expected),
        )


def is_plain(delta: TokenDelta) -> bool:
    """Whether a delta has tokens in the middle of a choice, and nothing else."""
    return bool(
        delta.token_ids
        and delta.finish_reason is None
        and delta.logprobs is None
        and not delta.num_drafted
    )


def merged(run: Sequence[TokenDelta]) -> TokenDelta:
    """Consecutive deltas of one choice as one delta."""
    first, last = run[0], run[-1]
    scores = [delta.logprobs for delta in run if delta.logprobs is not None]
    return replace(
        first,
        token_ids=tuple(token for delta in run for token in delta.token_ids),
        logprobs=tuple(each for some in scores for each in some) if scores else None,
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        error_code=last.error_code,
        error_message=last.error_message,
        retry_after=last.retry_after,
        timeline=last.timeline,
        num_drafted=sum(delta.num_drafted for delta in run),
        num_accepted=sum(delta.num_accepted for delta in run),
    )
