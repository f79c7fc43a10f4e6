"""`LLM`: the engine as a Python library, with vLLM's names of arguments, methods and outputs.

The engine runs in a thread of this process. Use an `LLM` as a context manager, or call `close`.
"""

import sys
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import Event, GrammarSpec, ModelCard
from engine.core.interfaces.request import SamplingParams as WireParams
from engine.core.interfaces.stats import EngineStats
from engine.core.store.catalogue import DEFAULT_MODEL
from engine.library.arguments import EngineArgs
from engine.library.embedded import (
    EmbeddedEngine,
    Messages,
    PreparedRequest,
    Prompt,
    batch_of,
)
from engine.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from engine.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from engine.backends.beam_search import Beam
    from engine.library.interp import LocalRunner, Trace

Params = WireParams | Sequence[WireParams] | None
# True shows a progress bar if standard error is a terminal. A function such as `tqdm` makes one.
Progress = bool | Callable[..., Any]


class LLM:
    """A model that runs in this process. `arguments` are fields of `EngineArgs`, with vLLM's names,
    for example `max_model_len` and `dtype`.

    Example: `LLM("smollm2-135m-instruct", max_model_len=2048, settings={"logging.level": "debug"})`
    """

    _tracing: "LocalRunner | None" = None

    def __init__(self, model: str = DEFAULT_MODEL, **arguments: Any) -> None:
        self.engine = EmbeddedEngine(EngineArgs.of(model=model, **arguments))

    @classmethod
    def from_engine_args(cls, arguments: EngineArgs) -> "LLM":
        made = cls.__new__(cls)
        made.engine = EmbeddedEngine(arguments)
        return made

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and free the model. Safe to call twice."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        grammar: GrammarSpec | None = None,
    ) -> list[RequestOutput]:
        """Generate a continuation of each prompt (text or token ids). The engine batches the
        prompts. `sampling_params` is for all prompts, or a list with an item per prompt.
        """
        batch = batch_of(prompts)
        pairs = zip(batch, _each(sampling_params, len(batch)), strict=True)
        asked = [self.engine.completion(prompt, params, grammar) for prompt, params in pairs]
        return self._run(asked, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate an answer to one conversation, or to each of several. A text is a conversation
        with a single user message.

        `options` may contain `grammar` and all fields of `ChatRequest` except `context` and
        `messages`, for example `tools` and `tool_choice`.
        """
        single = isinstance(messages, str) or (messages and isinstance(messages[0], Mapping))
        batch: Any = [messages] if single else messages
        pairs = zip(batch, _each(sampling_params, len(batch)), strict=True)
        asked = [self.engine.conversation(each, params, options) for each, params in pairs]
        return self._run(asked, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` likeliest continuations of each prompt (text or token ids)."""
        rules = params.rules()
        found = [
            self.engine.call(self.engine.beam_search(each, rules)) for each in batch_of(prompts)
        ]
        return [
            BeamSearchOutput([self._sequence(prompt + beam.token_ids, beam) for beam in beams])
            for prompt, beams in found
        ]

    def _sequence(self, token_ids: tuple[int, ...], beam: "Beam") -> BeamSearchSequence:
        text = self.engine.call(self.engine.backend.detokenize(token_ids))
        return BeamSearchSequence(list(token_ids), text, beam.score, beam.finish_reason)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A unit-length vector for each prompt (text or token ids)."""
        return self.engine.call(self.engine.embed(prompts, truncate_prompt_tokens))

    def score(
        self, data_1: Prompt | Sequence[Prompt], data_2: Prompt | Sequence[Prompt]
    ) -> list[ScoringRequestOutput]:
        """The similarity of each text of `data_1` with the text of `data_2` at the same place. A
        single text of `data_1` is compared with every text of `data_2`.
        """
        return self.engine.call(self.engine.score(data_1, data_2))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: WireParams | None = None,
        *,
        grammar: GrammarSpec | None = None,
    ) -> Generator[Event, None, None]:
        """Yields the events of one completion as they arrive. The last event is the token usage."""
        asked = self.engine.completion(prompt, sampling_params, grammar)
        return self._iterate(self.engine.events(asked))

    def stream_chat(
        self, messages: Messages, sampling_params: WireParams | None = None, **options: Any
    ) -> Generator[Event, None, None]:
        """Yields the events of one chat answer as they arrive. `options` are those of `chat`."""
        asked = self.engine.conversation(messages, sampling_params, options)
        return self._iterate(self.engine.events(asked))

    def trace(
        self,
        prompt: Prompt,
        max_tokens: int = 1,
        sampling_params: SamplingParams | None = None,
    ) -> "Trace":
        """A `with` block that reads and changes activations of a prompt (text or token ids):
        `with llm.trace(prompt) as t: x = t.blocks[5].resid_post.save()`. See `library/interp.py`.
        """
        from engine.library.interp import LocalRunner, Trace  # few programs trace

        if self._tracing is None:
            self._tracing = LocalRunner(self.engine, self.engine.vectors_dir)
        greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return Trace(self._tracing.run, prompt, sampling_params or greedy)

    @property
    def num_layers(self) -> int:
        """The number of layers whose activations `trace` reads."""
        sites = self.engine.call(self.engine.backend.sites())
        return sum(site["name"].endswith(".hook_resid_post") for site in sites)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call that gives none."""
        return self.engine.default_params()

    @property
    def preset_parameters(self) -> dict[str, Any]:
        """Sampling parameters that `[presets.ID]` of the configuration file sets for this model."""
        return self.engine.preset_parameters

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes that no running request uses."""
        self.engine.call(self.engine.backend.flush_prefixes())

    @property
    def card(self) -> ModelCard:
        """The model's description: context length, quantization, size."""
        return self.engine.card

    def stats(self) -> EngineStats | None:
        """The gauges and counters that the engine reported last. None before its first report."""
        return self.engine.backend.stats()

    def _run(self, asked: list[PreparedRequest], use_tqdm: Progress) -> list[RequestOutput]:
        bar = _bar(use_tqdm, len(asked))

        def on_done(_: RequestOutput) -> None:
            if bar is not None:
                bar.update(1)

        try:
            return self.engine.call(self.engine.gather(asked, on_done))
        finally:
            if bar is not None:
                bar.close()

    def _iterate(self, events: AsyncIterator[Event]) -> Generator[Event, None, None]:
        async def next_event() -> Event | None:
            return await anext(events, None)

        try:
            while (event := self.engine.call(next_event())) is not None:
                yield event
        finally:
            if self.engine.is_open:
                self.engine.call(events.aclose())  # type: ignore[attr-defined]


class _TerminalBar:
    """A progress bar with the two methods of `tqdm` that are used."""

    def __init__(self, total: int, desc: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(desc, total=total)
        self._progress.start()

    def update(self, number: int) -> None:
        self._progress.advance(self._task, number)

    def close(self) -> None:
        self._progress.stop()


def _bar(use_tqdm: Progress, total: int) -> Any:
    description = "Processed prompts"
    if callable(use_tqdm):
        return use_tqdm(total=total, desc=description)
    return _TerminalBar(total, description) if use_tqdm and sys.stderr.isatty() else None


def _each(params: Params, count: int) -> Sequence[WireParams | None]:
    """The parameters of each of `count` prompts."""
    if params is None or isinstance(params, WireParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"there are {count} prompts and {len(params)} sampling parameters; give one for all,"
            " or one per prompt",
            param="sampling_params",
        )
    return params
