"""The backend that serves a model with our own engine, on any framework.

The backend is part of the frontend. It turns text into token ids, sends them to the engine, and
turns the result into text. Each framework has a subclass, which only names the framework. The
engine runs in a supervised process, or in a thread if it is used as a library.
"""

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from engine.backends.base import BackendConfig, InferenceBackend, Opening, Resolved
from engine.backends.custom.engine_settings import EXAMINER
from engine.backends.custom.frontend.engine_client import (
    EngineClient,
    InlineClient,
    OnExit,
    OnMessage,
    ProcessClient,
)
from engine.backends.custom.frontend.engine_link import EngineLink
from engine.backends.custom.frontend.generation import Generation
from engine.backends.custom.frontend.prompts import (
    check_input,
    check_prepared,
    check_prompt,
    encode_chat,
    encode_words,
    is_long,
    needs_words,
    prepare_chat,
    prepare_completion,
    truncated,
    with_text_bias,
)
from engine.backends.custom.frontend.text_cache import keep_text
from engine.backends.custom.frontend.text_model import TextModel, load_text, with_template
from engine.backends.custom.ipc.engine_process import WORKER_MODULE, EngineProcess
from engine.backends.custom.options import IMAGE_ENCODERS, EngineOptions
from engine.backends.process import RestartPolicy
from engine.core.errors import ConfigError, UnavailableError
from engine.core.grammar.checker import GrammarChecker
from engine.core.grammar.spec import stop_grammar
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Embeddings,
    EmbedRequest,
    Event,
    Health,
    ModelCard,
    TextPair,
    TokenizerInfo,
)
from engine.core.interfaces.request import (
    ControlReply,
    EngineStats,
    GenerateRequest,
    Ready,
    SamplingParams,
)
from engine.core.interfaces.timeline import Preparation
from engine.core.sandbox.examination import examine
from engine.core.store.model_store import default_name, resolve_model
from engine.core.text.long_texts import after_other_long_texts

T = TypeVar("T")
TOKENIZER_THREADS = 2


class CustomBackend(InferenceBackend):
    """Serves a model on one of our frameworks.

    If `model` is a `BackendConfig`, its `backend_args` are fields of `EngineOptions`. With
    `in_process`, the engine runs in a thread of this process. Otherwise it runs in a child process,
    which can crash without harm to this process. `process` is such a child, if it was started
    early. `chat_template` replaces the model's own.
    """

    framework: ClassVar[str]
    # The module that runs as the engine process. With `in_process`, its function `run_engine` is
    # called in a thread.
    worker_module: ClassVar[str] = WORKER_MODULE
    # The function that checks the model's files before they are loaded. It runs in a sandbox.
    examiner: ClassVar[str] = EXAMINER

    def __init__(
        self,
        model: str | BackendConfig,
        *,
        options: EngineOptions | None = None,
        served_name: str | None = None,
        chat_template: str | None = None,
        in_process: bool = False,
        process: EngineProcess | None = None,
    ) -> None:
        config = model if isinstance(model, BackendConfig) else BackendConfig(model_name=model)
        self._options = options or _options(self.framework, config)
        self._served_name = served_name or default_name(config.model_name)
        self._chat_template = chat_template
        self._in_process = in_process
        self._process = process
        # An engine in a thread can't die alone, and is never restarted.
        max_revivals = 0 if in_process else self._options.max_revivals
        self._link = EngineLink(self._make_client, RestartPolicy(), max_revivals=max_revivals)
        self._encoders = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._checker = GrammarChecker()
        self._text: TextModel | None = None
        self._created = int(time.time())
        self._card: ModelCard | None = None  # built once, when the model is loaded

    async def start(self) -> str:
        path = resolve_model(self._options.model_path)
        self._options = msgspec.structs.replace(self._options, model_path=str(path))
        await asyncio.to_thread(lambda: keep_text(path, examine(path, self.examiner)))
        loop = asyncio.get_running_loop()
        # This process loads the tokenizer while the engine process loads the weights.
        reading = loop.run_in_executor(self._encoders, self._read_text, path)
        loading = asyncio.ensure_future(self._link.start())
        try:
            self._text, _ = await asyncio.gather(reading, loading)
        except BaseException:
            loading.cancel()
            await self.stop()
            raise
        return f"engine://{self.framework}/{self._served_name}"

    async def stop(self) -> None:
        await self._link.stop()
        await self._checker.close()
        self._encoders.shutdown(wait=False)

    def _read_text(self, path: Path) -> TextModel:
        text = self.read_text(path)
        return text if self._chat_template is None else with_template(text, self._chat_template)

    @staticmethod
    def read_text(path: Path) -> TextModel:
        """Load the model's tokenizer and chat template. This method runs in a thread."""
        return load_text(path)

    @property
    def ready(self) -> Ready | None:
        """The engine's `Ready` message. None while no engine is loaded."""
        return self._link.ready

    @property
    def engine_pid(self) -> int | None:
        return self._link.pid

    async def flush_cache(self) -> ControlReply:
        return await self._link.flush_cache()

    async def flush_prefixes(self, *, model: str = "") -> tuple[str, ...]:
        return ((await self.flush_cache()).message,)

    async def set_log_level(self, level: str) -> tuple[str, ...]:
        self._options = msgspec.structs.replace(self._options, log_level=level)
        if self._in_process or self._link.ready is None:
            return ()  # no child process runs; a new child gets the log level when it starts
        try:
            await self._link.set_log_level(level)
        except UnavailableError as error:
            return (f"{self._served_name}: {error.message}",)
        return ()

    def health(self) -> Health:
        trouble = self._link.trouble
        is_loaded = self._link.ready is not None and self._text is not None
        detail = trouble or self._link.detail
        if self._link.ready is not None and self._text is None:
            detail = "The tokenizer is loading."
        return Health(
            ready=is_loaded and trouble is None,
            detail=detail,
            step_age_s=self._link.step_age_s,
            num_restarts=self._link.num_restarts,
            num_revived=self._link.num_revived,
        )

    @property
    def is_ready(self) -> bool:
        # `is_up` is the result of the last periodic check. The engine may have recovered since
        # then, so if that check found trouble, check again.
        return self._text is not None and (self._link.is_up or self.health().ready)

    def memory_bytes(self) -> int:
        import psutil  # imported late, because a start does not need it

        total = 0
        for pid in {os.getpid(), self._link.pid} - {None}:
            with contextlib.suppress(psutil.NoSuchProcess):  # the process may exit at any moment
                total += psutil.Process(pid).memory_info().rss
        return total

    def models(self) -> list[ModelCard]:
        text, ready = self._text, self._link.ready
        if text is None:
            return []
        max_model_len = ready.max_seq_len if ready else text.config.max_position
        max_sequences = None if ready is None else ready.max_slots
        known = None if self._card is None else (self._card.max_model_len, self._card.max_sequences)
        if self._card is None or known != (max_model_len, max_sequences):
            self._card = self._make_card(text, max_model_len, max_sequences)
        return [self._card]

    def resolve(self, name: str | None) -> Resolved | None:
        return next((Resolved(card) for card in self.models() if name in (None, card.id)), None)

    def _make_card(
        self, text: TextModel, max_model_len: int, max_sequences: int | None
    ) -> ModelCard:
        return ModelCard(
            id=self._served_name,
            created=self._created,
            owned_by="engine",
            max_model_len=max_model_len,
            backend=self.framework,
            quantization=text.quantization,
            num_params=text.config.num_params,
            size_bytes=text.size_bytes,
            capabilities=text.capabilities + (("images",) if self._reads_images(text) else ()),
            emulated=text.emulated,
            template_options=text.template_options,
            trained_context=text.config.max_position,
            max_sequences=max_sequences,
            num_dimensions=None if text.reranks else text.config.hidden_size,
            prompt_names=tuple(sorted(name for name in text.prompts if name is not None)),
        )

    def _reads_images(self, text: TextModel) -> bool:
        vision, kinds = text.config.vision, IMAGE_ENCODERS.get(self._options.framework, ())
        return vision is not None and text.can_chat and vision.kind in kinds

    def stats(self) -> EngineStats | None:
        return self._link.stats

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        return Opening(self, request)

    def complete(self, request: CompletionRequest) -> AsyncIterator[Event]:
        return Opening(self, request)

    async def open(self, request: ChatRequest | CompletionRequest) -> Generation:
        """Prepare the prompt, check it, and submit it to the engine."""
        text, ready = self._loaded()
        began_at, context = time.monotonic(), request.context
        prepare = prepare_chat if isinstance(request, ChatRequest) else prepare_completion
        prepared = await self._encode(prepare, text, request)
        if context.truncate_prompt_tokens is not None:
            prepared = await self._encode(truncated, text, prepared, context, ready.max_seq_len)
        encoded_at = time.monotonic()
        check_prepared(prepared, context.params, ready.max_seq_len, text.config.vocab_size)
        if prepared.checked_grammar is not None:
            await self._checker.check(prepared.checked_grammar, prepared.grammar_param)
        if needs_words(context.params):
            for pattern in context.params.stop_regex:
                await self._checker.check(stop_grammar(pattern), "stop_regex")
            prepared = await self._encode(encode_words, text, prepared, context.params)
        checked_at = time.monotonic()
        params = context.params
        if params.logprob_token_ids:  # the engine takes them from the logprobs of all tokens
            params = msgspec.structs.replace(params, logprobs=text.config.vocab_size)
        if params.text_bias:
            params = await self._encode(with_text_bias, text, params)
        submitted = GenerateRequest(
            request_id=context.request_id,
            prompt=prepared.token_ids,
            params=params,
            eos_ids=text.eos_ids,
            priority=context.priority,
            salt=context.salt,
            tenant=context.tenant,
            timeout_s=context.timeout_s,
            queue_timeout_s=context.queue_timeout_s,
            grammar=prepared.grammar,
            images=prepared.images,
            bad_words=prepared.bad_words,
            dry_breakers=prepared.dry_breakers,
            reports_progress=context.on_progress is not None,
        )
        generation = Generation(
            submitted, text, prepared, self._link, context.on_progress, context.notes
        )
        self._link.submit(submitted, generation)
        if context.notes is not None:
            times = (began_at, encoded_at, checked_at, time.monotonic())
            context.notes.add_preparation(Preparation(*times, len(submitted.prompt)))
        if context.on_prompt is not None:
            context.on_prompt(prepared.token_ids)
        return generation

    async def embed(self, request: EmbedRequest) -> Embeddings:
        from engine.backends.custom.frontend.embedding import (
            scores_along,  # imports numpy, which nothing else here needs
            vectors_of,
        )

        text, ready = self._loaded()
        limit = request.truncate_prompt_tokens
        most = ready.max_seq_len if limit is not None and limit < 0 else limit
        names = request.prompt_names or (None,) * len(request.inputs)
        encoded = [
            await self._encode(text.encode_pair, each.first, each.second, most)
            if isinstance(each, TextPair)
            else await self._encode(text.encode_input, each, name, most)
            for each, name in zip(request.inputs, names, strict=True)
        ]
        for index, (prompt, _) in enumerate(encoded):
            name = "input" if len(encoded) == 1 else f"input[{index}]"
            check_input(len(prompt), ready.max_seq_len, name)
            check_prompt(prompt, text.config.vocab_size, name)
        requests = [
            GenerateRequest(
                request_id=f"{request.request_id}-{index}",
                prompt=prompt,
                params=SamplingParams(max_tokens=1),
                priority=request.priority,
                salt=request.salt,
                tenant=request.tenant,
                timeout_s=request.timeout_s,
                # A call opens only some of its requests at a time, so later requests may wait
                # longer. The limit on the waiting time therefore holds only for the first.
                queue_timeout_s=request.queue_timeout_s if index == 0 else None,
                pools=True,
                second_start=second_start,
            )
            for index, (prompt, second_start) in enumerate(encoded)
        ]
        size = 1 if text.reranks else text.config.hidden_size
        max_queued = self._options.max_queued
        vectors = await vectors_of(self._link, requests, max_queued, size, text.reranks)
        if text.ranker is not None:
            vectors = scores_along(vectors, text.ranker.direction)
        return Embeddings(vectors, sum(len(prompt) for prompt, _ in encoded))

    async def tokenize(
        self,
        content: ChatRequest | str,
        *,
        model: str = "",
        add_special_tokens: bool = True,
        parse_special: bool = False,
    ) -> tuple[int, ...]:
        text, _ = self._loaded()
        if isinstance(content, ChatRequest):
            return await self._encode(encode_chat, text, content)
        return await self._encode(text.encode_prompt, content, add_special_tokens, parse_special)

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str = "") -> str:
        text, _ = self._loaded()
        check_prompt(token_ids, text.config.vocab_size, "tokens")
        decode = functools.partial(text.tokenizer.decode, skip_special=False)
        return await self._encode(decode, token_ids)

    async def token_bytes(self, token_ids: tuple[int, ...], *, model: str = "") -> list[bytes]:
        text, _ = self._loaded()
        if token_ids:
            check_prompt(token_ids, text.config.vocab_size, "tokens")
        return list(map(text.tokenizer.token_literal, token_ids))

    async def tokenizer_info(self, *, model: str = "") -> TokenizerInfo:
        text, _ = self._loaded()
        return text.tokenizer_info

    def _loaded(self) -> tuple[TextModel, Ready]:
        text, ready = self._text, self._link.ready
        if text is None or ready is None:
            raise UnavailableError(self._link.detail, retry_after=2.0)
        return text, ready

    async def _encode(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run slow text work in a thread, so that it does not block the event loop."""
        if any(map(is_long, arguments)):
            return await after_other_long_texts(work, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._encoders, work, *arguments)

    def _make_client(self, on_message: OnMessage, on_exit: OnExit) -> EngineClient:
        if self._in_process:
            return InlineClient(self.worker_module, self._options, on_message)
        # The process that was started early is used only once. After a restart, the client starts a
        # new process.
        process, self._process = self._process, None
        return ProcessClient(self.worker_module, self._options, on_message, on_exit, process)


def _options(framework: str, config: BackendConfig) -> EngineOptions:
    """Build `EngineOptions` from the arguments of a backend. If an argument is unknown, an error
    names the argument.
    """
    fields = {"model_path": config.model_name, "framework": framework, **config.backend_args}
    unknown = sorted(fields.keys() - set(EngineOptions.__struct_fields__))
    if unknown:
        known = ", ".join(EngineOptions.__struct_fields__)
        raise ConfigError(f"unknown backend argument '{unknown[0]}'; there are: {known}")
    try:
        return msgspec.convert(fields, EngineOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"backend arguments: {error}") from error
