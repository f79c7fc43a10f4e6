"""A backend with plugins. For the server it is a normal backend.

If a plugin with `on_failure = "refuse"` is switched off, the backend reports that it is not ready.
So `/readyz` shows it, and requests are refused before they reach a plugin.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from engine.backends.base import InferenceBackend, ReplayedTokens, Resolved, Tokenizing
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Embeddings,
    EmbedRequest,
    Event,
    Health,
    ModelCard,
    TokenizerInfo,
    UsageEvent,
)
from engine.core.interfaces.request import GenerateRequest
from engine.core.interfaces.snapshot import EngineSnapshot
from engine.core.interfaces.stats import EngineStats
from engine.plugins.answer import PluggedAnswer, prepared
from engine.plugins.host import PluginHost
from engine.plugins.views import ResponseBuilder, applied, view_of


class PluggedBackend(InferenceBackend):
    """A backend with plugins. `hosts` are the plugins, in the order in which they get a request."""

    def __init__(self, inner: InferenceBackend, hosts: Sequence[PluginHost]) -> None:
        self.inner = inner
        self.hosts = list(hosts)
        self.totals_survive_restarts = inner.totals_survive_restarts

    @property
    def unwrapped(self) -> InferenceBackend:
        return self.inner.unwrapped

    def rewrapped(self, inner: InferenceBackend) -> InferenceBackend:
        self.inner = inner
        return self

    async def start(self) -> str:
        """Start the plugins while the backend starts. If any of them fails, all are stopped."""
        starting = asyncio.create_task(self.inner.start())
        try:
            for host in self.hosts:
                await host.start()
            return await starting
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self.stop()
            raise

    async def stop(self) -> None:
        try:
            await self.inner.stop()
        finally:
            await asyncio.gather(*(host.stop() for host in self.hosts))

    def health(self) -> Health:
        return self._judged(self.inner.health())

    @property
    def is_ready(self) -> bool:
        return self.inner.is_ready and self._judged(Health(ready=True, detail="")).ready

    def model_health(self, model_id: str) -> Health:
        return self._judged(self.inner.model_health(model_id))

    @property
    def is_accelerated(self) -> bool:
        return self.inner.is_accelerated

    def memory_bytes(self) -> int:
        return self.inner.memory_bytes()

    def models(self) -> list[ModelCard]:
        return self.inner.models()

    def stats(self) -> EngineStats | None:
        return self.inner.stats()

    def resolve(self, name: str | None) -> Resolved | None:
        return self.inner.resolve(name)

    def answered_by(self, request_id: str) -> tuple[str, ...]:
        return self.inner.answered_by(request_id)

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        if not self._hosts_at_work:
            return self.inner.chat(request)
        return PluggedAnswer(self.inner, self.hosts, request)

    def complete(self, request: CompletionRequest) -> AsyncIterator[Event]:
        if not self._hosts_at_work:
            return self.inner.complete(request)
        return PluggedAnswer(self.inner, self.hosts, request)

    async def flush_prefixes(self, *, model: str = "") -> tuple[str, ...]:
        return await self.inner.flush_prefixes(model=model)

    async def snapshots(self) -> dict[str, EngineSnapshot]:
        return await self.inner.snapshots()

    async def replay(self, request: GenerateRequest, *, model: str = "") -> ReplayedTokens:
        return await self.inner.replay(request, model=model)

    def files_of(self, model: str) -> Path | None:
        return self.inner.files_of(model)

    @property
    def adapters(self) -> Mapping[str, str]:
        return self.inner.adapters

    async def load_adapter(
        self, name: str, path: str, *, base: str | None = None, replaces: bool = False
    ) -> None:
        await self.inner.load_adapter(name, path, base=base, replaces=replaces)

    async def unload_adapter(self, name: str) -> None:
        await self.inner.unload_adapter(name)

    async def set_log_level(self, level: str) -> tuple[str, ...]:
        return await self.inner.set_log_level(level)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        builder = ResponseBuilder(0)
        view = view_of(request)
        failure: BaseException | None = None
        try:
            view = await prepared(self.hosts, view)
            changed = applied(request, view)
            assert isinstance(changed, EmbedRequest)
            made = await self.inner.embed(changed)
            builder.add(
                UsageEvent(prompt_tokens=made.prompt_tokens, completion_tokens=0, cached_tokens=0)
            )
            return made
        except BaseException as error:
            failure = error
            raise
        finally:
            seen, ended_by = view, failure
            for host in self.hosts:
                if host.observes:
                    host.observe(lambda: builder.response(seen, ended_by))

    async def tokenize(
        self, content: ChatRequest | str, *, model: str = "", **how: Unpack[Tokenizing]
    ) -> tuple[int, ...]:
        return await self.inner.tokenize(content, model=model, **how)

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str = "") -> str:
        return await self.inner.detokenize(token_ids, model=model)

    async def token_bytes(self, token_ids: tuple[int, ...], *, model: str = "") -> list[bytes]:
        return await self.inner.token_bytes(token_ids, model=model)

    async def tokenizer_info(self, *, model: str = "") -> TokenizerInfo | None:
        return await self.inner.tokenizer_info(model=model)

    async def sites(self, *, model: str = "") -> list[dict[str, Any]]:
        return await self.inner.sites(model=model)

    def find(self, name: str) -> PluginHost | None:
        return next((host for host in self.hosts if host.name == name), None)

    @property
    def _hosts_at_work(self) -> bool:
        return any(host.is_active or host.blocks for host in self.hosts)

    def _judged(self, health: Health) -> Health:
        blocking = next((host for host in self.hosts if host.blocks), None)
        if blocking is None or not health.ready:
            return health
        return Health(
            ready=False,
            detail=blocking.refusal().message,
            step_age_s=health.step_age_s,
            num_restarts=health.num_restarts,
            num_revived=health.num_revived,
            alive=health.alive,
        )


def describe(host: PluginHost) -> dict[str, Any]:
    """A plugin's state, for the admin API."""
    hooks = {
        "pre_inference": host.prepares,
        "text_filter": host.filters,
        "post_inference": host.observes or host.rewrites,
    }
    return {
        "name": host.name,
        "version": host.plugin.version,
        "order": host.order,
        "state": "on" if host.is_active else "off",
        "on_failure": host.on_failure,
        "hooks": [name for name, is_there in hooks.items() if is_there],
        "rewrites_response": host.rewrites,
        "failures": host.num_failures,
        "last_failure": host.last_failure,
    }
