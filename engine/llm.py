"""The engine as a Python library. `LLM` returns texts and events; `InferenceEngine` returns
responses in OpenAI's format.

Both run the engine in a thread of this process. They send it the same requests as the HTTP server
does, so outputs, batching and prefix caching are the same as on the server. Use them as context
managers, or call `close`.
"""

import asyncio
import itertools
import json
import secrets
import threading
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.app import build_backend
from engine.core.config import load_settings
from engine.core.errors import InvalidRequestError, UnavailableError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    EmbedRequest,
    Event,
    GenerationContext,
    GrammarSpec,
    ModelCard,
    TextEvent,
    TokenText,
    UsageEvent,
)
from engine.core.interfaces.request import EngineStats, SamplingParams
from engine.servers.http.sse import DONE
from engine.servers.openai.format import ChatStream, Collected, Envelope, chat_body, new_envelope

DEFAULT_MODEL = "smollm2-135m-instruct"
# Seconds that an interrupted call waits for its coroutine to end.
CANCEL_GRACE_S = 5.0
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice of an answer. `logprobs` is None unless log-probabilities were requested.

    Each tool call has OpenAI's form, `{"id", "type", "function": {"name", "arguments": JSON
    text}}`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenText, ...] | None
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The result for one prompt. `text` is the text of the first choice."""

    choices: tuple[Completion, ...]
    usage: UsageEvent

    @property
    def text(self) -> str:
        return self.choices[0].text


class LLM:
    """A model that runs in this process. `settings` holds settings of the configuration file, with
    keys of the form `section.key`.

    Example: `LLM("smollm2-135m-instruct", settings={"model.dtype": "bfloat16"})`
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, settings: Mapping[str, Any] | None = None
    ) -> None:
        loaded = load_settings(None, {"model.model_path": model, **(settings or {})}, {})
        self._max_queued = loaded.settings.performance.max_queued_requests
        self._backend = build_backend(loaded.settings, in_process=True)
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._call(self._backend.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and free the model. Safe to call twice."""
        if self._thread.is_alive():
            try:
                self._call(self._backend.stop())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        grammar: GrammarSpec | None = None,
    ) -> list[GenerationOutput]:
        """Generate a continuation of each prompt (text or token ids). The engine batches the
        prompts.
        """
        streams = [self._complete(prompt, params, grammar) for prompt in _batch(prompts)]
        return self._collect(streams, params)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> list[GenerationOutput]:
        """Generate an answer to one conversation, or to each of several. The engine batches them.

        `options` may contain `grammar` and all fields of `ChatRequest` except `context` and
        `messages`, for example `tools` and `tool_choice`.
        """
        single = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        batch: Any = [conversations] if single else conversations
        return self._collect([self._chat(each, params, **options) for each in batch], params)

    def embed(self, inputs: Prompt | Sequence[Prompt]) -> NDArray[np.float32]:
        """Unit-length embeddings of texts or lists of token ids, as an array (inputs,
        dimensions).
        """
        texts = tuple(each if isinstance(each, str) else tuple(each) for each in _batch(inputs))
        request = EmbedRequest(request_id=f"llm-{next(self._ids)}", inputs=texts)
        return self._call(self._backend.embed(request)).vectors

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Event, None, None]:
        """Yields the events of one completion as they arrive. The last event is the token usage."""
        return self._iterate(self._complete(prompt, params, None))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> Generator[Event, None, None]:
        """Yields the events of one chat answer as they arrive. `options` are those of `chat`."""
        return self._iterate(self._chat(messages, params, **options))

    @property
    def card(self) -> ModelCard:
        """The model's description: context length, quantization, size."""
        return self._backend.models()[0]

    def stats(self) -> EngineStats | None:
        """The gauges and counters that the engine reported last. None before its first report."""
        return self._backend.stats()

    def _context(
        self, params: SamplingParams | None, grammar: GrammarSpec | None
    ) -> GenerationContext:
        params = params or SamplingParams(max_tokens=None)
        check_params(params)
        request_id = f"llm-{next(self._ids)}"
        return GenerationContext(request_id=request_id, params=params, grammar=grammar)

    def _complete(
        self, prompt: Prompt, params: SamplingParams | None, grammar: GrammarSpec | None
    ) -> AsyncIterator[Event]:
        content = prompt if isinstance(prompt, str) else tuple(prompt)
        request = CompletionRequest(context=self._context(params, grammar), prompt=content)
        return self._backend.complete(request)

    def _chat(
        self,
        messages: Messages,
        params: SamplingParams | None,
        grammar: GrammarSpec | None = None,
        **options: Any,
    ) -> AsyncIterator[Event]:
        known = set(ChatRequest.__struct_fields__) - {"context", "messages"}
        unknown = sorted(options.keys() - known)
        if unknown:
            raise InvalidRequestError(
                f"unknown option {unknown[0]!r}; there are: {', '.join(sorted(known))}, grammar",
                param=unknown[0],
            )
        given = {**options, "messages": [dict(message) for message in messages]}
        context = self._context(params, grammar)
        try:
            request = msgspec.convert({**given, "context": context}, ChatRequest)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"the options of a chat: {error}") from error
        return self._backend.chat(request)

    def _collect(
        self, streams: list[AsyncIterator[Event]], params: SamplingParams | None
    ) -> list[GenerationOutput]:
        """Run the streams concurrently and collect their outputs. At most as many streams are open
        at a time as the engine's queue accepts. If one stream fails, the others are cancelled.
        """

        async def gather() -> list[GenerationOutput]:
            places = asyncio.Semaphore(max(1, self._max_queued // (params.n if params else 1)))

            async def collect(stream: AsyncIterator[Event]) -> GenerationOutput:
                async with places:
                    return await _collect_one(stream)

            tasks = [asyncio.ensure_future(collect(stream)) for stream in streams]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

        return self._call(gather())

    def _iterate(self, events: AsyncIterator[Event]) -> Generator[Event, None, None]:
        async def next_event() -> Event | None:
            return await anext(events, None)

        try:
            while (event := self._call(next_event())) is not None:
                yield event
        finally:
            if self._thread.is_alive():
                self._call(events.aclose())  # type: ignore[attr-defined]

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the engine's event loop and wait for it. If this thread is
        interrupted, for example by Ctrl-C, the coroutine is cancelled.
        """
        if not self._thread.is_alive():
            work.close()
            raise UnavailableError("This engine has been closed; make a new one.")
        ended = threading.Event()

        async def tracked() -> Result:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(tracked(), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                ended.wait(CANCEL_GRACE_S)
            raise


class InferenceEngine:
    """A model that runs in this process, with OpenAI's formats for chat messages and responses."""

    def __init__(
        self, model: str = DEFAULT_MODEL, *, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._llm = LLM(model, settings=settings)

    def __enter__(self) -> "InferenceEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._llm.close()

    def generate(self, prompts: Sequence[str], **params: Any) -> list[str]:
        """Return a continuation of each prompt. `params` are fields of `SamplingParams`."""
        return [output.text for output in self._llm.generate(prompts, _params(params))]

    def chat_completion(self, messages: Messages, **params: Any) -> dict[str, Any]:
        """Answer a conversation. Returns a complete `chat.completion` object."""
        collected = Collected(_params(params).n)
        usage: UsageEvent | None = None
        for event in self._llm.stream_chat(messages, _params(params)):
            if isinstance(event, UsageEvent):
                usage = event
            else:
                collected.add([event])
        assert usage is not None, "a stream that ends well ends with its usage"
        with_logprobs = params.get("logprobs") is not None
        body = chat_body(self._envelope(), collected, usage, with_logprobs=with_logprobs)
        return dict(json.loads(body))

    def chat_completion_stream(self, messages: Messages, **params: Any) -> Iterator[dict[str, Any]]:
        """Answer a conversation. Yields `chat.completion.chunk` objects as they arrive. The last
        chunk has the token usage.
        """
        stream = ChatStream(self._envelope(), _params(params).n, include_usage=True)
        yield from _parsed(stream.opening())
        for event in self._llm.stream_chat(messages, _params(params)):
            if isinstance(event, UsageEvent):
                yield from _parsed(stream.closing(event))
            else:
                yield from _parsed(stream.chunk(event))

    def _envelope(self) -> Envelope:
        return new_envelope(f"chatcmpl-{secrets.token_hex(16)}", self._llm.card)


def _batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Put a single prompt (text or token ids) into a list. A list of prompts stays as it is."""
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    batch: Any = [prompts] if single else prompts
    return batch


async def _collect_one(events: AsyncIterator[Event]) -> GenerationOutput:
    seen: list[Any] = [event async for event in events]
    usage = seen.pop()
    assert isinstance(usage, UsageEvent), "a stream that ends well ends with its usage"
    collected = Collected(1 + max(event.choice for event in seen))
    collected.add(seen)
    choices = []
    for index, choice in enumerate(collected.choices):
        assert choice.finish is not None, "every choice ends"
        texts = [event for event in seen if isinstance(event, TextEvent) and event.choice == index]
        choices.append(
            Completion(
                text=choice.text,
                token_ids=tuple(token for event in texts for token in event.token_ids),
                finish_reason=choice.finish.reason,
                logprobs=tuple(choice.tokens) or None,
                reasoning="".join(choice.reasoning),
                tool_calls=tuple(call.body() for _, call in sorted(choice.calls.items())),
            )
        )
    return GenerationOutput(tuple(choices), usage)


def check_params(params: SamplingParams) -> None:
    """Raise an error if a sampling parameter is invalid. The comparisons are written so that NaN is
    invalid too.
    """
    infinity = float("inf")
    rules = {
        "n >= 1": params.n >= 1,
        "max_tokens >= 1": params.max_tokens is None or params.max_tokens >= 1,
        "min_tokens >= 0": params.min_tokens >= 0,
        "0 <= temperature < inf": 0 <= params.temperature < infinity,
        "top_k >= 0": params.top_k >= 0,
        "0 < top_p <= 1": 0 < params.top_p <= 1,
        "0 <= min_p <= 1": 0 <= params.min_p <= 1,
        "0 < repetition_penalty < inf": 0 < params.repetition_penalty < infinity,
        "-inf < presence_penalty < inf": -infinity < params.presence_penalty < infinity,
        "-inf < frequency_penalty < inf": -infinity < params.frequency_penalty < infinity,
        "-inf <= logit_bias < inf": all(b < infinity for b in params.logit_bias.values()),
        "0 <= seed < 2**63": params.seed is None or 0 <= params.seed < 2**63,
        "logprobs >= 0": params.logprobs is None or params.logprobs >= 0,
        # `GenerationOutput` has no field for prompt logprobs. /v1/completions with `echo` returns
        # them.
        "score_prompt is false": not params.score_prompt,
    }
    for rule, holds in rules.items():
        if not holds:
            raise InvalidRequestError(f"sampling parameters break the rule {rule}")


def _params(params: Mapping[str, Any]) -> SamplingParams:
    """Build `SamplingParams` from keyword arguments. If a name is unknown, the error lists the
    valid names.
    """
    known = set(SamplingParams.__struct_fields__)
    unknown = sorted(set(params) - known)
    if unknown:
        raise InvalidRequestError(
            f"unknown sampling parameter {unknown[0]!r}; there are: {', '.join(sorted(known))}",
            param=unknown[0],
        )
    return SamplingParams(**{"max_tokens": None, **params})


def _parsed(sse: bytes) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of server-sent events, without the final `[DONE]`."""
    for event in sse.split(b"\n\n"):
        if event and event + b"\n\n" != DONE:
            yield json.loads(event.removeprefix(b"data: "))
