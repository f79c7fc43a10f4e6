"""An engine inside this process: a backend, and a thread whose event loop runs it.

Requests are the same as those of the HTTP server, so outputs, batching and prefix caching are the
same too.
"""

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from engine.backends.base import InferenceBackend, close_events
from engine.backends.custom.app import build_backend
from engine.backends.custom.engine_settings import backend_name, has_engine, preset_of
from engine.core.config import load_settings
from engine.core.config_schema import Settings
from engine.core.errors import InvalidRequestError, UnavailableError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    EmbedRequest,
    Event,
    GenerationContext,
    GrammarSpec,
    ModelCard,
    TextPair,
)
from engine.core.interfaces.request import SamplingParams as WireParams
from engine.core.store.model_store import needs_pull
from engine.frontend.generation import Generation
from engine.library.answers import GrowingOutput
from engine.library.arguments import EngineArgs
from engine.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from engine.sampling_params import SamplingParams, make_params, wire_params
from engine.servers.schema.messages import parse_messages

if TYPE_CHECKING:
    from engine.backends.beam_search import Beam, BeamRules

# Seconds that an interrupted call waits for its coroutine to end.
CANCEL_GRACE_S = 5.0
Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = str | Sequence[Mapping[str, Any]]
Result = TypeVar("Result")
_CHAT_OPTIONS = set(ChatRequest.__struct_fields__) - {"context", "messages"}
# vLLM's names of our options.
_CHAT_ALIASES = {"chat_template_kwargs": "template_options"}


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready to be submitted, and what the user gave for it."""

    request: ChatRequest | CompletionRequest
    prompt: str | None
    params: WireParams

    @property
    def answer(self) -> GrowingOutput:
        return GrowingOutput(self.request.context.request_id, self.prompt, self.params)


class EmbeddedEngine:
    """A model in this process. Its methods may be called from any thread. `call` waits for a
    coroutine; `submit` does not.
    """

    def __init__(self, arguments: EngineArgs) -> None:
        loaded = load_settings(None, arguments.flags(), {})
        _fetch_model(loaded.settings)
        self.max_queued = loaded.settings.performance.max_queued_requests
        self.vectors_dir = loaded.settings.vectors_dir
        self.backend: InferenceBackend = build_backend(loaded.settings, in_process=True)
        # Requests without a seed get consecutive seeds, so a program gives the same output again.
        self._seeds = None if arguments.seed is None else itertools.count(arguments.seed)
        self._preset = preset_of(loaded.settings)
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.call(self.backend.start())
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the engine and free the model. Safe to call twice."""
        if self._thread.is_alive():
            try:
                self.call(self.backend.stop())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def submit(self, work: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Run a coroutine on the engine's event loop."""
        if not self._thread.is_alive():
            work.close()
            raise UnavailableError("This engine has been closed; make a new one.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the engine's event loop and wait for it. If this thread is
        interrupted, for example by Ctrl-C, the coroutine is cancelled.
        """
        ended = threading.Event()

        async def tracked() -> Result:
            try:
                return await work
            finally:
                ended.set()

        try:
            future = self.submit(tracked())
        except UnavailableError:
            work.close()
            raise
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                ended.wait(CANCEL_GRACE_S)
            raise

    def default_params(self) -> SamplingParams:
        """The parameters of a request that gives none: those of the model's preset. Without them,
        an answer may fill the context.
        """
        return make_params(self.preset_parameters)

    @property
    def preset_parameters(self) -> dict[str, Any]:
        return {} if self._preset is None else self._preset.defaults

    def completion(
        self,
        prompt: Prompt,
        params: WireParams | None,
        grammar: GrammarSpec | None = None,
        request_id: str | None = None,
    ) -> PreparedRequest:
        given = params or self.default_params()
        content = _prompt(prompt)
        context = self._context(given, grammar, request_id)
        request = CompletionRequest(
            context=context, prompt=content, echo=context.params.score_prompt
        )
        return PreparedRequest(request, content if isinstance(content, str) else None, given)

    def conversation(
        self,
        messages: Messages,
        params: WireParams | None,
        options: Mapping[str, Any],
        request_id: str | None = None,
    ) -> PreparedRequest:
        """A chat request. `options` has `grammar` and fields of `ChatRequest`."""
        given = params or self.default_params()
        fields = {_CHAT_ALIASES.get(name, name): value for name, value in options.items()}
        grammar = fields.pop("grammar", None)
        unknown = sorted(fields.keys() - _CHAT_OPTIONS)
        if unknown:
            known = ", ".join(sorted(_CHAT_OPTIONS | _CHAT_ALIASES.keys()))
            raise InvalidRequestError(
                f"unknown option {unknown[0]!r}; there are: {known}, grammar", param=unknown[0]
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self._preset is not None and self._preset.template_options:
            fields["template_options"] = self._template_options(fields.get("template_options"))
        system = None if self._preset is None else self._preset.system
        if system is not None and all(each.get("role") != "system" for each in messages):
            messages = [{"role": "system", "content": system}, *messages]
        context = self._context(given, grammar, request_id)
        fields = {name: value for name, value in fields.items() if value is not None}
        parsed = parse_messages(list(map(dict, messages)))
        self._check_images(parsed)
        fields |= {"context": context, "messages": parsed}
        try:
            request = msgspec.convert(fields, ChatRequest)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"the options of a chat: {error}") from error
        return PreparedRequest(request, None, given)

    def _template_options(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The given options, with those of the preset that are not given."""
        assert self._preset is not None
        preset, read = self._preset.template_options, self.card.template_options
        known = {name: each for name, each in preset.items() if name in read}
        return known | dict(given or {})

    def _check_images(self, messages: tuple[dict[str, Any], ...]) -> None:
        """Refuse images if the model reads none, and images on the web, which are not fetched."""
        images = [image for message in messages for image in message.get("images", ())]
        if images and "images" not in self.card.capabilities:
            raise InvalidRequestError(f"{self.card.id} does not read images", param="messages")
        if not all(isinstance(image, bytes) for image in images):
            raise InvalidRequestError(
                "the library fetches no images; give them as data: URLs (base64)", param="messages"
            )

    def _context(
        self, params: WireParams, grammar: GrammarSpec | None, request_id: str | None
    ) -> GenerationContext:
        wire = wire_params(params)
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            if grammar is not None:
                raise InvalidRequestError(
                    "grammar and structured_outputs exclude each other", param="grammar"
                )
            grammar = params.structured_outputs.spec()
        if self._seeds is not None and wire.seed is None:
            wire = msgspec.structs.replace(wire, seed=next(self._seeds) % 2**63)
        request_id = request_id or self._new_id()
        return GenerationContext(request_id=request_id, params=wire, grammar=grammar)

    async def events(
        self, asked: PreparedRequest, answer: GrowingOutput | None = None
    ) -> AsyncIterator[Event]:
        """The events of a request. If an answer is given, it gets the tokens of the prompt."""
        source = await self.backend.open(asked.request)
        try:
            if answer is not None and isinstance(source, Generation):
                answer.started(source.request.prompt)
            async for event in source:
                yield event
        finally:
            await close_events(source)

    async def stream(self, asked: PreparedRequest) -> AsyncIterator[RequestOutput]:
        answer = asked.answer
        async for event in self.events(asked, answer):
            for output in answer.stream(event):
                yield output

    async def whole(self, asked: PreparedRequest) -> RequestOutput:
        answer = asked.answer
        async for event in self.events(asked, answer):
            answer.add(event)
        return answer.output()

    async def gather(
        self, asked: Sequence[PreparedRequest], on_done: Callable[[RequestOutput], None]
    ) -> list[RequestOutput]:
        """Run the requests concurrently and collect their outputs. At most as many requests are
        open at a time as the engine's queue accepts. If one fails, the others are cancelled.
        """
        most = max((each.params.n for each in asked), default=1)
        places = asyncio.Semaphore(max(1, self.max_queued // most))

        async def collect(each: PreparedRequest) -> RequestOutput:
            async with places:
                output = await self.whole(each)
            on_done(output)
            return output

        tasks = [asyncio.ensure_future(collect(each)) for each in asked]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def beam_search(
        self, prompt: Prompt, rules: "BeamRules"
    ) -> tuple[tuple[int, ...], "list[Beam]"]:
        """The tokens of a prompt, and the best beams after it."""
        # Imported late, because few programs search.
        from engine.backends.beam_search import BeamSearch

        context = GenerationContext(request_id=self._new_id(), params=WireParams())
        request = CompletionRequest(context=context, prompt=_prompt(prompt))
        return await BeamSearch(self.backend, rules).beams(request)

    async def embed(
        self, prompts: Prompt | Sequence[Prompt], truncate: int | None = None
    ) -> list[EmbeddingRequestOutput]:
        """A unit-length vector for each prompt. `truncate` keeps only this many last tokens."""
        inputs, request_id = tuple(map(_prompt, batch_of(prompts))), self._new_id()
        request = EmbedRequest(
            request_id=request_id, inputs=inputs, truncate_prompt_tokens=truncate
        )
        made = await self.backend.embed(request)
        return [
            EmbeddingRequestOutput(f"{request_id}-{index}", EmbeddingOutput(vector))
            for index, vector in enumerate(made.vectors)
        ]

    async def score(
        self, data_1: Prompt | Sequence[Prompt], data_2: Prompt | Sequence[Prompt]
    ) -> list[ScoringRequestOutput]:
        """The similarity of each text of `data_1` with the text of `data_2` at the same place. A
        single text of `data_1` is compared with every text of `data_2`.
        """
        if "score" not in self.card.capabilities:
            raise InvalidRequestError(
                f"{self.card.id} was not trained to compare texts; use a sentence encoder, such as"
                " all-minilm-l6-v2",
                param="model",
            )
        left, right = batch_of(data_1), batch_of(data_2)
        if len(left) not in (1, len(right)):
            raise InvalidRequestError(
                f"data_1 has {len(left)} texts and data_2 {len(right)}; give one text in data_1, or"
                " as many as in data_2",
                param="data_1",
            )
        if "rerank" in self.card.capabilities:
            ones = [left[0]] * len(right) if len(left) == 1 else left
            return await self._ranked(ones, right)
        made = await self.embed([*left, *right])
        ones = made[: len(left)] * (len(right) if len(left) == 1 else 1)
        pairs = zip(ones, made[len(left) :], strict=True)
        return [
            ScoringRequestOutput(other.request_id, ScoringOutput(_cosine(one, other)))
            for one, other in pairs
        ]

    async def _ranked(
        self, left: Sequence[Prompt], right: Sequence[Prompt]
    ) -> list[ScoringRequestOutput]:
        """The scores that a reranker gives to pairs of texts."""
        pairs = []
        for one, other in zip(map(_prompt, left), map(_prompt, right), strict=True):
            if not isinstance(one, str) or not isinstance(other, str):
                raise InvalidRequestError("A reranker scores texts, not token ids.")
            pairs.append(TextPair(one, other))
        request = EmbedRequest(request_id=self._new_id(), inputs=tuple(pairs))
        made = await self.backend.embed(request)
        return [
            ScoringRequestOutput(f"{request.request_id}-{index}", ScoringOutput(float(score)))
            for index, (score,) in enumerate(made.vectors)
        ]

    @property
    def card(self) -> ModelCard:
        """The model's description: context length, quantization, size."""
        return self.backend.models()[0]

    def _new_id(self) -> str:
        return f"llm-{next(self._ids)}"


def _cosine(one: EmbeddingRequestOutput, other: EmbeddingRequestOutput) -> float:
    return float(one.outputs.vector @ other.outputs.vector)  # both have unit length


def _fetch_model(settings: Settings) -> None:
    """Download the model if it is missing, with progress bars on a terminal."""
    model = settings.model.model_path
    if has_engine(backend_name(settings)) and needs_pull(model):
        from engine.cli.pull_progress import pull_shown

        pull_shown(model)


def batch_of(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """Put a single prompt (text, token ids, or an object) into a list. A list of prompts stays as
    it is.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    is_ids = len(prompts) > 0 and not isinstance(prompts[0], str | Mapping | Sequence)
    return [prompts] if is_ids else prompts


def _prompt(prompt: Prompt) -> str | tuple[int, ...]:
    """The text or the token ids of a prompt. vLLM's objects, `{"prompt": text}` and
    `{"prompt_token_ids": ids}`, are accepted.
    """
    if isinstance(prompt, Mapping):
        unknown = sorted(prompt.keys() - {"prompt", "prompt_token_ids"})
        if unknown or len(prompt) != 1:
            raise InvalidRequestError(
                "a prompt object has either prompt or prompt_token_ids, and nothing else; got "
                + ", ".join(sorted(prompt)),
                param=unknown[0] if unknown else "prompt",
            )
        prompt = next(iter(prompt.values()))
    if isinstance(prompt, str):
        return prompt
    return tuple(int(token) for token in prompt)
