"""The backend that serves a model with our own engine, on any framework.

The backend is part of the frontend. It turns text into token ids, sends them to the engine, and
turns the result into text. Each framework has a subclass, which only names the framework. The
engine runs in a supervised process, or in a thread if it is used as a library.
"""

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Unpack

import msgspec

from engine.adapters.served import ServedAdapters
from engine.architectures.base import ModelConfig
from engine.architectures.sites import site_list
from engine.backends.base import (
    BackendConfig,
    InferenceBackend,
    InterruptedRequest,
    Opening,
    ReplayedTokens,
    Tokenizing,
)
from engine.backends.custom.engine_settings import VALIDATOR, changed_options, options_of
from engine.core.errors import CacheError, EngineError, UnavailableError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Embeddings,
    EmbedRequest,
    Event,
    Health,
    ModelCard,
    TokenizerInfo,
)
from engine.core.interfaces.request import AdapterRef, GenerateRequest, Ready
from engine.core.interfaces.snapshot import EngineSnapshot
from engine.core.interfaces.stats import EngineStats
from engine.core.interfaces.timeline import Preparation
from engine.core.memory import memory_room, num_oom_kills, separate_oom_kills
from engine.core.sandbox.checkpoint_validation import validate
from engine.core.store.model_store import default_name, resolve_model
from engine.frontend.engine_link import EngineLink
from engine.frontend.generation import Generation
from engine.frontend.held_images import HeldImages
from engine.frontend.link import Link
from engine.frontend.prompts import Preparer, check_prompt, encode_chat
from engine.frontend.replay import replayed_tokens
from engine.frontend.request_recovery import OpenRequest
from engine.frontend.text_cache import files_key, keep_text
from engine.frontend.text_model import TextModel, card_of, load_text, with_template
from engine.ipc.child_process import RestartPolicy, resident_bytes
from engine.ipc.connection import (
    EngineClient,
    InlineClient,
    OnExit,
    OnMessage,
    ProcessClient,
)
from engine.ipc.engine_process import WORKER_MODULE, EngineProcess
from engine.ipc.options import IMAGE_ENCODERS, TAPPED, EngineOptions

log = logging.getLogger(__name__)

OOM_MEMORY_S = 3600.0  # for so long, an engine that was killed for lack of memory counts


class CustomBackend(InferenceBackend):
    """Serves a model on one of our frameworks.

    If `model` is a `BackendConfig`, its `backend_args` are fields of `EngineOptions`. The engine
    runs in a child process, which can crash without harm to this one, or in a thread of this
    process if `in_process`. `process` is such a child, if it was started early.
    """

    framework: ClassVar[str]
    # The module that runs as the engine process. With `in_process`, its function `run_engine` is
    # called in a thread.
    worker_module: ClassVar[str] = WORKER_MODULE
    # The function that checks the model's files before they are loaded. It runs in a sandbox.
    validator: ClassVar[str] = VALIDATOR

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
        self._options = options or options_of(self.framework, config)
        self._model = self._options.model_path  # as given; `start` resolves it to a path
        self._served_name = served_name or default_name(config.model_name)
        self._chat_template = chat_template
        self._in_process = in_process
        self._process = process
        self._num_oom_kills = num_oom_kills()  # when the last engine was started
        self._killed_at: list[float] = []  # times of lacks of memory
        # An engine in a thread can't die alone, and is never restarted.
        max_revivals = 0 if in_process else self._options.max_revivals
        self._link: Link = EngineLink(
            self._make_client, RestartPolicy(), max_revivals=max_revivals, move=self._move
        )
        self._adapters = ServedAdapters(self._link)
        self._num_calls = 0  # calls that still need this object, even if the engine is replaced
        self._preparer = Preparer()
        self._held_images = HeldImages()
        self._text: TextModel | None = None
        self._created = int(time.time())
        self._files = ""  # identifies the files that the model is read from
        self._card: ModelCard | None = None  # built once, when the model is loaded

    async def start(self) -> str:
        if not self._in_process and not separate_oom_kills():
            log.warning(
                "if memory runs out, the kernel kills this server together with its engine "
                "(memory.oom.group); where only the engine is killed, requests continue"
            )
        path = resolve_model(self._options.model_path)
        self._options = msgspec.structs.replace(self._options, model_path=str(path))
        self._files = files_key(path)
        await asyncio.to_thread(lambda: keep_text(path, validate(path, self.validator)))
        if self._options.draft_model:
            draft = resolve_model(self._options.draft_model)
            await asyncio.to_thread(validate, draft, self.validator)
        # This process loads the tokenizer while the engine process loads the weights.
        reading = asyncio.ensure_future(self._preparer.encode(self._read_text, path))
        loading = asyncio.ensure_future(self._link.start())
        try:
            text, _ = await asyncio.gather(reading, loading)
            await self._adapters.start(self._options.adapters, self._served_name)
            self._text = text
        except BaseException:
            loading.cancel()
            await self.stop()
            raise
        return f"engine://{self.framework}/{self._served_name}"

    async def stop(self) -> None:
        await self._link.stop()
        await self._preparer.close()

    def remade(self, model: str | None, changes: Mapping[str, Any]) -> "CustomBackend":
        """A new backend with the settings of this one, except for its model and options."""
        current = msgspec.structs.replace(self._options, adapters=self._adapters.paths)
        options = changed_options(current, model or self._model, changes)
        return type(self)(
            options.model_path,
            options=options,
            served_name=self._served_name,
            chat_template=self._chat_template,
            in_process=self._in_process,
        )

    @property
    def num_open(self) -> int:
        return self._link.num_open + self._num_calls

    @property
    def fingerprint(self) -> str | None:
        """Equal for backends between which requests can move. None if they never can."""
        if (ready := self._link.last_ready) is None or not self._link.survives:
            return None
        return self._fingerprint(ready)

    def _fingerprint(self, ready: Ready) -> str:
        return self._options.fingerprint(self._files, ready.device, ready.dtype, ready.max_seq_len)

    @property
    def model_path(self) -> str:
        """Where the model is. It is resolved when the backend starts."""
        return self._options.model_path

    @property
    def vocab_size(self) -> int:
        return 0 if self._text is None else self._text.config.vocab_size

    @property
    def max_position(self) -> int:
        """The longest context for which the model was made."""
        return 0 if self._text is None else self._text.config.max_position

    def pool(self, make: Callable[[Link, EngineOptions], Link]) -> Link:
        """Put a pool of engines in the place of the only engine, which becomes one of them."""
        self._link = make(self._link, self._options)
        self.totals_survive_restarts = True
        return self._link

    def hand_over(self, successor: "CustomBackend") -> int | None:
        """Move all open and later requests to `successor`. None: no request can move."""
        can_move = self.fingerprint == successor.fingerprint is not None
        return self._link.hand_over(successor._link) if can_move else None

    def take_over(self, interrupted: InterruptedRequest) -> bool:
        opened = interrupted.state
        can_take = self._link.is_up and interrupted.fingerprint == self.fingerprint
        if can_take and isinstance(opened, OpenRequest):
            self._link.take_over(opened)
        return can_take

    def _move(self, opened: OpenRequest) -> bool:
        if self.on_interrupted is None or (fingerprint := self.fingerprint) is None:
            return False
        return self.on_interrupted(
            InterruptedRequest(opened.request.request_id, fingerprint, opened)
        )

    def _read_text(self, path: Path) -> TextModel:
        text = self.read_text(path)
        return text if self._chat_template is None else with_template(text, self._chat_template)

    @staticmethod
    def read_text(path: Path) -> TextModel:
        """Load the model's tokenizer and chat template, in a thread."""
        return load_text(path)

    @property
    def ready(self) -> Ready | None:
        """The engine's `Ready` message. None while no engine is loaded."""
        return self._link.ready

    @property
    def is_accelerated(self) -> bool:
        ready = self._link.last_ready
        return ready is not None and not ready.device.lower().startswith("cpu")

    @property
    def engine_pid(self) -> int | None:
        return self._link.pid

    async def flush_prefixes(self, *, model: str = "") -> tuple[str, ...]:
        reply = await self._link.flush_cache()
        if not reply.ok:
            raise CacheError(f"The prefix cache was not flushed: {reply.message}")
        return (reply.message,)

    async def snapshots(self) -> dict[str, EngineSnapshot]:
        with contextlib.suppress(EngineError):
            taken = await self._link.snapshots()
            return {name or self._served_name: each for name, each in taken.items()}
        return {}

    def files_of(self, model: str) -> Path | None:
        is_known = self._text is not None and model in ("", self._served_name)
        return Path(self._options.model_path) if is_known else None

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
            alive=not self._link.is_overdue,
        )

    @property
    def is_ready(self) -> bool:
        return self._text is not None and (self._link.accepts or self.health().ready)

    def memory_bytes(self) -> int:
        return resident_bytes({os.getpid(), self._link.pid or os.getpid()})

    def models(self) -> list[ModelCard]:
        text, ready = self._text, self._link.last_ready
        if text is None:
            return []
        facts: tuple[int, int | None, bool] = (text.config.max_position, None, False)
        if ready is not None:
            facts = (ready.max_seq_len, ready.max_slots, ready.speculates)
        card = self._card
        if card is None or facts != (card.max_model_len, card.max_sequences, card.speculates):
            images = IMAGE_ENCODERS.get(self.framework, ())
            made = (self._served_name, self.framework, self._created)
            card = card_of(text, *made, *facts, images, self.framework in TAPPED)
            identity = (ready.cache_identity if ready else "") or None
            self._card = card = msgspec.structs.replace(card, cache_identity=identity)
        return [card, *self._adapters.cards(card)] if self._adapters.served else [card]

    @property
    def adapters(self) -> Mapping[str, str]:
        return self._adapters.paths

    def _adapter(self, model: str) -> AdapterRef | None:
        """The adapter that answers requests for this model. None: the base model does."""
        found = self._adapters.served.get(model)
        return None if found is None else found.ref

    async def load_adapter(
        self, name: str, path: str, *, base: str | None = None, replaces: bool = False
    ) -> None:
        await self._adapters.add(name, path, self._served_name, base, replaces=replaces)

    async def unload_adapter(self, name: str) -> None:
        self._adapters.remove(name)

    def stats(self) -> EngineStats | None:
        return self._link.stats

    def answered_by(self, request_id: str) -> tuple[str, ...]:
        return self._link.answered_by(request_id)

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        return Opening(self, request)

    def complete(self, request: CompletionRequest) -> AsyncIterator[Event]:
        return Opening(self, request)

    async def open(self, request: ChatRequest | CompletionRequest) -> Generation:
        with self._counted():
            return await self._open(request)

    async def _open(self, request: ChatRequest | CompletionRequest) -> Generation:
        text, ready = self._loaded()
        context, notes = request.context, request.context.notes
        prepared, params, times = await self._preparer.prepare(request, text, ready.max_seq_len)
        if notes is not None and notes.recorded is not None and params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(62))
        adapter = self._adapter(context.model)
        submitted = prepared.request(context, params, text.eos_ids, ready.max_seq_len, adapter)
        told = (context.on_progress, context.notes, context.on_captured, context.on_wait)
        generation = Generation(submitted, text, prepared, self._link, *told)
        if not prepared.images:
            self._link.submit(submitted, generation)
        else:
            self._submit_images(submitted, generation)
        if notes is not None:
            notes.add_preparation(Preparation(*times, time.monotonic(), len(submitted.prompt)))
            if notes.recorded is not None:
                generation.record(notes.record(submitted, self._fingerprint(ready)))
        if context.on_prompt is not None:
            context.on_prompt(prepared.token_ids)
        if context.on_wait is not None:
            context.on_wait(True)
        return generation

    def _submit_images(self, request: GenerateRequest, generation: Generation) -> None:
        held, request_id = self._held_images, request.request_id
        held.take(request_id, request.tenant, request.images)
        generation.on_released = lambda: held.release(request_id)
        try:
            self._link.submit(request, generation)
        except EngineError:
            held.release(request_id)
            raise

    async def replay(self, request: GenerateRequest, *, model: str = "") -> ReplayedTokens:
        _, ready = self._loaded()
        token_ids = await replayed_tokens(self._link, request)
        return ReplayedTokens(token_ids, self._fingerprint(ready))

    async def embed(self, request: EmbedRequest) -> Embeddings:
        # This module imports numpy, which nothing else here needs.
        from engine.frontend.embedding import embedded

        with self._counted():
            text, ready = self._loaded()
            limits = (ready.max_seq_len, self._options.max_queued)
            adapter = self._adapter(request.model)
            return await embedded(
                request, text, *limits, self._link, self._preparer.encode, adapter
            )

    async def tokenize(
        self, content: ChatRequest | str, *, model: str = "", **how: Unpack[Tokenizing]
    ) -> tuple[int, ...]:
        text, _ = self._loaded()
        if isinstance(content, ChatRequest):
            return await self._preparer.encode(encode_chat, text, content)
        special, parse = how.get("add_special_tokens", True), how.get("parse_special", False)
        return await self._preparer.encode(text.encode_prompt, content, special, parse)

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str = "") -> str:
        text, _ = self._loaded()
        check_prompt(token_ids, text.config.vocab_size, "tokens")
        decode = functools.partial(text.tokenizer.decode, skip_special=False)
        return await self._preparer.encode(decode, token_ids)

    async def token_bytes(self, token_ids: tuple[int, ...], *, model: str = "") -> list[bytes]:
        text, _ = self._loaded()
        if token_ids:
            check_prompt(token_ids, text.config.vocab_size, "tokens")
        return list(map(text.tokenizer.token_literal, token_ids))

    async def tokenizer_info(self, *, model: str = "") -> TokenizerInfo:
        text, _ = self._loaded()
        return text.tokenizer_info

    async def sites(self, *, model: str = "") -> list[dict[str, Any]]:
        config = self._loaded()[0].config
        return site_list(config) if isinstance(config, ModelConfig) else []

    def _loaded(self) -> tuple[TextModel, Ready]:
        # While the engine is restarted, the sizes of the last one are used. The next has the same.
        text, ready = self._text, self._link.last_ready
        if text is None or ready is None or not (self._link.ready or self._link.accepts):
            raise UnavailableError(self._link.detail, retry_after=2.0)
        return text, ready

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    def _make_client(self, on_message: OnMessage, on_exit: OnExit) -> EngineClient:
        if self._in_process:
            return InlineClient(self.worker_module, self._options, on_message)
        self._count_oom_kills()
        # The process that was started early is used once; later clients start a new one.
        process, self._process = self._process, None
        return ProcessClient(self.worker_module, self._options, on_message, on_exit, process)

    def _count_oom_kills(self) -> None:
        """If memory ran out since the last engine started, the next one plans with less. Kills of
        long ago do not count, because what took the memory may be gone.
        """
        before, self._num_oom_kills = self._num_oom_kills, num_oom_kills()
        is_new, now = self._num_oom_kills > before, time.monotonic()
        recent = [each for each in self._killed_at if now - each < OOM_MEMORY_S]
        self._killed_at = [*recent, now] if is_new else recent
        self._options = msgspec.structs.replace(self._options, num_oom_kills=len(self._killed_at))
        if is_new:
            log.error(
                "a process was killed for lack of memory (%s); the next engine gets a smaller KV "
                "cache. Raise the memory limit, or lower performance.memory_pool_size_mb",
                memory_room().bound or "the machine has no more",
            )
