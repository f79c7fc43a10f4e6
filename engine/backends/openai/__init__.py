"""Any OpenAI-compatible server as a backend.

The server's streams are parsed into typed events and formatted again, so clients see the same
format for every backend. See `dialects.py` for the differences between servers.
"""

import logging
from collections.abc import AsyncIterator
from typing import ClassVar, Unpack

from engine.backends.base import BackendConfig, InferenceBackend, Tokenizing
from engine.backends.openai.answer import RemoteAnswer
from engine.backends.openai.config import OpenAIConfig, parse_endpoint, request_headers
from engine.backends.openai.discovery import Discovery, check_lacks
from engine.backends.openai.http_client import HttpClient
from engine.backends.openai.link import ServerLink
from engine.core.errors import UnavailableError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Embeddings,
    EmbedRequest,
    Event,
    Health,
    ModelCard,
)
from engine.core.interfaces.request import SamplingParams
from engine.core.interfaces.stats import EngineStats

__all__ = ["OpenAIBackend", "OpenAIConfig"]


log = logging.getLogger(__name__)


class OpenAIBackend(InferenceBackend):
    """One model of the server at `base_url`."""

    config_type: ClassVar[type[BackendConfig]] = OpenAIConfig

    def __init__(self, config: OpenAIConfig) -> None:
        check_lacks(config, SamplingParams.__struct_fields__)
        self._config = config
        self._endpoint = parse_endpoint(config.base_url)
        self._link: ServerLink | None = None

    async def start(self) -> str:
        await self.stop()
        config, endpoint = self._config, self._endpoint
        if endpoint.is_exposed and (config.api_key_env or config.api_key_file):
            log.warning("the key for %s is sent unencrypted; use https", endpoint.url)
        client = HttpClient(
            endpoint,
            request_headers(config),
            connect_timeout_s=config.connect_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
        )
        try:
            found = await Discovery(client, config, endpoint.prefix, endpoint.root).run()
        except BaseException:
            client.close()
            raise
        log.info("%s speaks %s; its model is %s", endpoint.url, found.dialect.name, found.card.id)
        self._link = ServerLink(client, config, endpoint, found)
        self._link.watch.start()
        return endpoint.url

    async def stop(self) -> None:
        if self._link is not None:
            await self._link.close()

    def health(self) -> Health:
        if self._link is None:
            return Health(ready=False, detail="not connected yet")
        watch = self._link.watch
        return Health(ready=watch.is_ready, detail=watch.detail)

    def memory_bytes(self) -> int:
        """0, because the memory belongs to another process, perhaps on another machine."""
        return 0

    def models(self) -> list[ModelCard]:
        return [] if self._link is None else [self._link.card]

    def stats(self) -> EngineStats | None:
        return None

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        return RemoteAnswer(lambda sink: self._connected().answer(request, sink))

    def complete(self, request: CompletionRequest) -> AsyncIterator[Event]:
        return RemoteAnswer(lambda sink: self._connected().answer(request, sink))

    async def embed(self, request: EmbedRequest) -> Embeddings:
        return await self._connected().embed(request)

    async def tokenize(
        self, content: ChatRequest | str, *, model: str = "", **how: Unpack[Tokenizing]
    ) -> tuple[int, ...]:
        special = how.get("add_special_tokens", True)
        return await self._connected().tokenize(content, special, how.get("parse_special", False))

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str = "") -> str:
        return await self._connected().detokenize(token_ids)

    def _connected(self) -> ServerLink:
        if self._link is None:
            raise UnavailableError("The model's server is not connected yet.")
        return self._link
