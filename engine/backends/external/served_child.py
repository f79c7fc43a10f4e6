"""A backend whose engine is another program: a supervised child with an OpenAI-compatible API."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import ClassVar, Unpack

import httpx
import msgspec

from engine.backends.base import BackendConfig, InferenceBackend, Tokenizing
from engine.backends.external.child_logs import ChildLog
from engine.backends.external.external_child import ExternalChild
from engine.backends.external.listening import Place
from engine.backends.external.reaping import reap_stale
from engine.backends.external.served_config import ServedConfig, warn_if_old
from engine.backends.external.supervisor import Patience, Supervisor
from engine.backends.openai import OpenAIBackend, OpenAIConfig
from engine.backends.openai.config import DialectName
from engine.core.errors import ModelError, UnavailableError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Embeddings,
    EmbedRequest,
    Event,
    Health,
    ModelCard,
)
from engine.core.interfaces.stats import EngineStats

PROBE_TIMEOUT_S = 10.0


class ServerProbe:
    """Checks whether a server is ready. `url` is `http://...` or `unix:///path`. `key` is the API
    key.
    """

    def __init__(self, url: str, model_id: str, key: str | None = None) -> None:
        path = url.removeprefix("unix://")
        is_unix = path != url
        self._model_id = model_id
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        self._client = httpx.AsyncClient(
            base_url="http://localhost" if is_unix else url,
            transport=httpx.AsyncHTTPTransport(uds=path if is_unix else None),
            timeout=PROBE_TIMEOUT_S,
            headers=headers,
        )

    async def problem(self) -> str | None:
        """Why the server is not ready. None if it is ready."""
        try:
            health = await self._client.get("/health")
            if health.status_code != 200:
                return f"/health answers {health.status_code}"
            models = await self._client.get("/v1/models")
            if models.status_code != 200:
                return f"/v1/models answers {models.status_code}"
            listed = [str(each["id"]) for each in models.json()["data"]]
        except httpx.TimeoutException:
            return "it does not answer in time"
        except httpx.TransportError:
            return "nothing listens yet"
        except (KeyError, TypeError, ValueError):
            return "/v1/models answers with something else than a list of models"
        if self._model_id not in listed:
            return f"it serves {', '.join(listed) or 'nothing'}, not {self._model_id}"
        return None

    async def close(self) -> None:
        await self._client.aclose()


log = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0


class ServedBackend(InferenceBackend):
    """An engine in a child process. A subclass names the engine and chooses the address where it
    listens.
    """

    config_type: ClassVar[type[BackendConfig]]
    dialect: ClassVar[DialectName]  # which variant of the OpenAI API the engine has
    module: ClassVar[str]  # Python module of the engine, which must be installed

    def __init__(self, config: ServedConfig) -> None:
        assert isinstance(config, self.config_type)
        self._config = config
        self._name = config.engine_name
        self._logs = ChildLog(self.dialect)
        self._place: Place | None = None
        self._supervisor: Supervisor | None = None
        self._endpoint: _ServedEndpoint | None = None
        self._looking: asyncio.Task[None] | None = None  # task that checks the engine's version

    def argv(self) -> list[str]:
        """The command that starts the engine. Before `start`, the address in it may be a
        placeholder. Raises `EngineError` if the configuration is invalid.
        """
        return self._config.argv(self._config.resolved_model(), self._place)

    async def start(self) -> str:
        """Start the engine and wait until it is ready. If it is not ready within `start_timeout_s`,
        end it and raise.
        """
        config = self._config
        # Raise for an invalid configuration before an address is reserved.
        self.argv()
        config.environment()
        await asyncio.to_thread(reap_stale)
        place = self._place = self._listen()
        if place.is_exposed and config.api_key is None:
            log.warning("%s serves all who reach %s: it has no key", self._name, place.url)
        if config.trust_remote_code:
            log.warning("%s may run code from the repository of %s", self._name, config.model_name)
        self._endpoint = _ServedEndpoint(self._client_config(place), config)
        self._supervisor = Supervisor(
            self._name,
            self._begin,
            self._endpoint,
            self._logs,
            Patience(start_timeout_s=config.start_timeout_s),
        )
        looking = warn_if_old(self.module, config.interpreter(), config.environment())
        self._looking = asyncio.create_task(looking)  # not awaited: the interpreter may hang
        try:
            await self._supervisor.start()
        except ModelError as error:
            await self.stop()
            if self._logs.mentions(f"No module named '{self.module}'"):
                raise ModelError(
                    f"{config.interpreter()} has no {self._name}: set python to the interpreter of"
                    " an environment where it is installed"
                ) from error
            raise
        except BaseException:
            await self.stop()
            raise
        return place.url

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._supervisor is not None:
            await self._supervisor.stop()
        if self._endpoint is not None:
            await self._endpoint.close()
        place, self._place = self._place, None
        if place is not None:
            place.release()

    def health(self) -> Health:
        supervisor = self._supervisor
        if supervisor is None:
            return Health(ready=False, detail=f"{self._name} has not been started.")
        client = self._client
        state = client.health() if client is not None else None
        return Health(
            ready=state is not None and state.ready,
            detail=supervisor.detail if state is None else state.detail,
            step_age_s=state.step_age_s if state is not None else None,
            num_restarts=supervisor.num_restarts,
            alive=not supervisor.is_overdue,
        )

    def memory_bytes(self) -> int:
        child = self._supervisor.child if self._supervisor is not None else None
        return child.memory_bytes() if isinstance(child, ExternalChild) else 0

    def models(self) -> list[ModelCard]:
        """The models. They are also listed while the engine restarts. Requests are then refused
        with an error that says when to retry.
        """
        return self._endpoint.cards if self._endpoint is not None else []

    def stats(self) -> EngineStats | None:
        return self._client.stats() if self._client is not None else None

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        client = self._client
        return client.chat(request) if client is not None else self._refuse()

    def complete(self, request: CompletionRequest) -> AsyncIterator[Event]:
        client = self._client
        return client.complete(request) if client is not None else self._refuse()

    async def embed(self, request: EmbedRequest) -> Embeddings:
        return await self._running().embed(request)

    async def tokenize(
        self, content: ChatRequest | str, *, model: str = "", **how: Unpack[Tokenizing]
    ) -> tuple[int, ...]:
        return await self._running().tokenize(content, model=model, **how)

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str = "") -> str:
        return await self._running().detokenize(token_ids, model=model)

    @abstractmethod
    def _listen(self) -> Place:
        """Reserve the address where the child will listen."""

    def _client_config(self, place: Place) -> OpenAIConfig:
        return OpenAIConfig(
            model_name=self._config.model_id, base_url=api_url(place), dialect=self.dialect
        )

    async def _begin(self) -> ExternalChild:
        assert self._place is not None
        self._place.prepare()
        config = self._config
        return await ExternalChild.start(
            self._name,
            self.argv(),
            config.environment() | self._place.environment | config.env,
            self._logs,
            grace_s=config.stop_grace_s,
            folder=self._place.folder,
        )

    @property
    def _client(self) -> OpenAIBackend | None:
        return self._endpoint.client if self._endpoint is not None else None

    def _running(self) -> OpenAIBackend:
        client = self._client
        if client is None:
            raise self._is_down()
        return client

    def _is_down(self) -> UnavailableError:
        return UnavailableError(
            f"{self._name} is not ready; it is loading or being restarted.",
            retry_after=RETRY_AFTER_S,
        )

    async def _refuse(self) -> AsyncIterator[Event]:
        raise self._is_down()
        yield  # makes this function a generator


class _ServedEndpoint:
    """Connects to the server of a child. `client` is set while the server is ready."""

    def __init__(self, client_config: OpenAIConfig, config: ServedConfig) -> None:
        self._client_config = client_config
        self._config = config
        url = client_config.base_url.removesuffix("/v1")
        self._probe = ServerProbe(url, config.model_id, config.api_key)
        self.client: OpenAIBackend | None = None
        self.cards: list[ModelCard] = []

    async def problem(self) -> str | None:
        return await self._probe.problem()

    async def up(self) -> None:
        client = OpenAIBackend(self._client_config)
        try:
            await client.start()
        except BaseException:
            await client.stop()
            raise
        (card,) = client.models()
        can = self._config.capabilities(card.capabilities)
        self.cards = [msgspec.structs.replace(card, capabilities=can)]
        self.client = client

    async def down(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            await client.stop()

    async def close(self) -> None:
        await self._probe.close()


def api_url(place: Place) -> str:
    return place.url if place.url.startswith("unix://") else f"{place.url}/v1"
