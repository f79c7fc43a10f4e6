"""An `InferenceBackend` without a model, for tests of the layers above a backend.

It answers with its `words` or with a `script` of events, at a configurable pace. It records its
requests, how many streams are open, and how many were cancelled.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from engine.backends.base import InferenceBackend
from engine.core.errors import EngineError, InvalidRequestError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Embeddings,
    EmbedRequest,
    Event,
    FinishEvent,
    GenerationContext,
    Health,
    ModelCard,
    PromptProgress,
    ReasoningEvent,
    TextEvent,
    TokenizerInfo,
    TokenText,
    ToolCallEvent,
    TopLogprob,
    UsageEvent,
)
from engine.core.interfaces.stats import EngineStats

MODEL = "tests/fake-model"
CONTEXT_LENGTH = 4096
NUM_DIMENSIONS = 8
DEFAULT_WORDS = ("Hello", " from", " a", " fake", " model", ".")
CARD = ModelCard(
    id=MODEL,
    created=1_700_000_000,
    owned_by="tests",
    max_model_len=CONTEXT_LENGTH,
    backend="fake",
    capabilities=(
        "completions",
        "chat",
        "embeddings",
        "interp",
        "score",
        "tools",
        "json_schema",
        "reasoning",
        "suffix",
    ),
    template_options=("enable_thinking",),
    trained_context=2 * CONTEXT_LENGTH,
    num_dimensions=NUM_DIMENSIONS,
)

Scripted = TextEvent | ReasoningEvent | ToolCallEvent | FinishEvent
Script = Sequence[Scripted]


def call_script(*calls: tuple[str, str], choice: int = 0, said: str = "") -> list[Scripted]:
    """Events of an answer that calls tools, each given as a name and JSON arguments. The arguments
    of each call arrive in two pieces.
    """
    events: list[Scripted] = [TextEvent(choice, said, 1)] if said else []
    for index, (name, arguments) in enumerate(calls):
        half = len(arguments) // 2
        call_id = f"call_{index}"
        events += [
            ToolCallEvent(choice, index, "", call_id, name),
            TextEvent(choice, "", 1),
            ToolCallEvent(choice, index, arguments[:half]),
            ToolCallEvent(choice, index, arguments[half:]),
        ]
    return [*events, FinishEvent(choice, "tool_calls")]


def reasoning_script(thoughts: Sequence[str], words: Sequence[str]) -> list[Scripted]:
    """Events of an answer with reasoning before its text."""
    events: list[Scripted] = []
    for thought in thoughts:
        events += [ReasoningEvent(0, thought), TextEvent(0, "", 1)]
    events += [TextEvent(0, word, 1) for word in words]
    return [*events, FinishEvent(0, "stop")]


class FakeBackend(InferenceBackend):
    """Generates one token per word. A prompt has one token per word or id."""

    def __init__(self, words: Sequence[str] = DEFAULT_WORDS) -> None:
        self.reset(words)

    def reset(self, words: Sequence[str] = DEFAULT_WORDS) -> None:
        """Reset the state, for a test that shares a server with others."""
        self.words = tuple(words)
        # Used instead of the words; a function of the request if answers should differ.
        self.script: Script | Callable[[ChatRequest | CompletionRequest], Script] | None = None
        self.reasoning_tokens = 0  # reported in the usage
        self.cards = [CARD]
        self.check_s = 0.0  # time until a refusal
        # If set, a request waits in a queue until its turn comes, or until it is refused.
        self.turn: asyncio.Event | None = None
        self.tells_prompt = True  # whether it tells the prompt's length before the answer
        self.prefill_s = 0.0
        self.token_s: float | None = 0.0  # None: all tokens at once
        self.refusal: EngineError | None = None  # raised before the first event
        self.failure: Exception | None = None  # raised after `fail_after` tokens of a choice
        self.fail_after = 0
        self.ready = True
        self.alive = True
        self.start_error: EngineError | None = None
        self.stats_now: EngineStats | None = EngineStats(prefix_queries=100, prefix_hits=25)
        self.requests: list[ChatRequest | CompletionRequest] = []
        self.embed_requests: list[EmbedRequest] = []
        self.num_revivals = 0  # as each request's usage tells it
        self.num_open = 0
        self.num_ended = 0
        self.num_cut_short = 0
        self.is_stopped = False
        self.log_levels: list[str] = []  # levels that were set

    def set_card(self, **fields: Any) -> None:
        """Pretend to be another model: `set_card(capabilities=("completions",),
        emulated=("tools",))`.
        """
        self.cards = [msgspec.structs.replace(CARD, **fields)]

    async def start(self) -> str:
        if self.start_error is not None:
            raise self.start_error
        return "fake://"

    async def stop(self) -> None:
        self.is_stopped = True

    def health(self) -> Health:
        detail = "ready" if self.ready else "loading weights"
        return Health(ready=self.ready, detail=detail, step_age_s=0.5, alive=self.alive)

    def memory_bytes(self) -> int:
        return 3 * 2**20

    def models(self) -> list[ModelCard]:
        return self.cards

    def stats(self) -> EngineStats | None:
        return self.stats_now

    async def set_log_level(self, level: str) -> tuple[str, ...]:
        self.log_levels.append(level)
        return ("an engine that does not answer",) if level == "debug" else ()

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        return self._answer(request, len(_chat_text(request).split()))

    def complete(self, request: CompletionRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        return self._answer(request, _count(request.prompt))

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """A vector that depends only on its input."""
        self.embed_requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        vectors = np.stack([_vector(each) for each in request.inputs])
        return Embeddings(vectors, sum(_count(each) for each in request.inputs))

    async def tokenize(
        self,
        content: ChatRequest | str,
        *,
        model: str = "",
        add_special_tokens: bool = True,
        parse_special: bool = False,
    ) -> tuple[int, ...]:
        """One token per byte; the special token is 256."""
        text = content if isinstance(content, str) else _chat_text(content)
        ids: list[int] = [256] if add_special_tokens else []
        for part in re.split("(<s>)", text) if parse_special else [text]:
            ids += [256] if parse_special and part == "<s>" else part.encode()
        return tuple(ids)

    async def tokenizer_info(self, *, model: str = "") -> TokenizerInfo:
        return TokenizerInfo(
            vocab_size=257,
            bos_token="<s>",
            bos_token_id=256,
            eos_token=None,
            eos_token_id=None,
            chat_template="{{ messages }}",
            special_tokens={"<s>": 256},
        )

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str = "") -> str:
        for token_id in token_ids:
            if token_id > 256:
                raise InvalidRequestError(f"There is no token {token_id}.", param="tokens")
        pieces = [b"<s>" if each == 256 else bytes([each]) for each in token_ids]
        return b"".join(pieces).decode("utf-8", "replace")

    async def _answer(
        self, request: ChatRequest | CompletionRequest, num_prompt: int
    ) -> AsyncIterator[Event]:
        context = request.context
        if self.check_s:
            await asyncio.sleep(self.check_s)
        if self.turn is not None:
            await self._queue(context, num_prompt, self.turn)
        if self.refusal is not None:
            raise self.refusal
        if num_prompt >= CONTEXT_LENGTH:
            raise InvalidRequestError(
                f"This model's maximum context length is {CONTEXT_LENGTH} tokens."
                f" The prompt has {num_prompt}.",
                param="messages",
                code="context_length_exceeded",
            )
        if context.on_prompt is not None and self.turn is None:
            context.on_prompt((0,) * num_prompt if self.tells_prompt else None)
        if context.on_progress is not None:
            for processed in range(num_prompt // 2, num_prompt + 1):
                context.on_progress(PromptProgress(num_prompt, num_prompt // 2, processed, 0.01))
        self.num_open += 1
        finished = False
        try:
            await asyncio.sleep(self.prefill_s)
            num_tokens = 0
            for position, step in enumerate(self._steps(request)):
                if self.failure is not None and position == self.fail_after:
                    raise self.failure
                for event in step:
                    num_tokens += event.num_tokens if isinstance(event, TextEvent) else 0
                    yield event
                if self.token_s is not None:
                    await asyncio.sleep(self.token_s)
            yield UsageEvent(
                prompt_tokens=num_prompt,
                completion_tokens=num_tokens,
                cached_tokens=num_prompt // 2,
                queue_s=0.001,
                prefill_s=self.prefill_s,
                decode_s=(self.token_s or 0.0) * num_tokens / context.params.n,
                reasoning_tokens=self.reasoning_tokens,
                num_revivals=self.num_revivals,
            )
            finished = True
        finally:
            self.num_open -= 1
            self.num_ended += 1
            self.num_cut_short += not finished

    async def _queue(
        self, context: GenerationContext, num_prompt: int, turn: asyncio.Event
    ) -> None:
        assert context.on_prompt is not None and context.on_wait is not None
        context.on_prompt((0,) * num_prompt)
        context.on_wait(True)
        await turn.wait()
        if self.refusal is None:
            context.on_wait(False)

    def _steps(self, request: ChatRequest | CompletionRequest) -> list[list[Scripted]]:
        """The events in groups; each group is sent without a pause."""
        if self.script is not None:
            script = self.script(request) if callable(self.script) else self.script
            return [[event] for event in script]
        params = request.context.params
        words = self.words[: params.max_tokens]
        steps: list[list[Scripted]] = [
            [
                TextEvent(choice, word, 1, _logprobs(word, params.logprobs))
                for choice in range(params.n)
            ]
            for word in words
        ]
        is_whole = len(words) == len(self.words)
        steps.append(
            [FinishEvent(choice, "stop" if is_whole else "length") for choice in range(params.n)]
        )
        if isinstance(request, CompletionRequest) and request.echo:
            steps.insert(0, [_echo(request, choice) for choice in range(params.n)])
        return steps


def _chat_text(request: ChatRequest) -> str:
    return " ".join(message["content"] for message in request.messages)


def _count(prompt: str | tuple[int, ...]) -> int:
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _vector(text: str | tuple[int, ...]) -> Any:
    digest = hashlib.sha256(repr(text).encode()).digest()[:NUM_DIMENSIONS]
    vector = np.frombuffer(digest, np.uint8).astype(np.float32) + 1
    return vector / np.linalg.norm(vector)


def _echo(request: CompletionRequest, choice: int) -> TextEvent:
    """The prompt's words. The first word has no logprob."""
    assert isinstance(request.prompt, str)
    params = request.context.params
    if not params.score_prompt:
        return TextEvent(choice, request.prompt, 0)
    first, *rest = request.prompt.split(" ")
    tokens = [TokenText(first, first.encode(), float("nan"))]
    for word in rest:
        tokens += _logprobs(" " + word, params.logprobs) or ()
    return TextEvent(choice, request.prompt, 0, tuple(tokens))


def _logprobs(word: str, num_top: int | None) -> tuple[TokenText, ...] | None:
    if num_top is None:
        return None
    top = tuple(TopLogprob(f"{word}{i}", b"x", -1.0 - i) for i in range(num_top))
    return (TokenText(word, word.encode(), float("-inf") if word == "." else -0.5, top),)
