"""State and helpers that all generating routes share: the backend, admission, model lookup."""

import asyncio
import functools
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from engine.backends.base import BackendHolder, InferenceBackend, Resolved
from engine.core.config_schema import Settings
from engine.core.errors import (
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    UnavailableError,
)
from engine.core.interfaces.backend import ModelCard, Preset
from engine.core.interfaces.stats import EngineStats
from engine.core.key_file import NO_LIMITS
from engine.core.observability.metrics import Metrics
from engine.servers.access.auth import KeyRing, Principal, principal_of
from engine.servers.access.quotas import Quotas
from engine.servers.http.errors import LLAMACPP_PATHS, PromptTooLargeError
from engine.servers.http.limits import decode_object, read_parsed
from engine.servers.http.request_log import RequestHistory, record_of
from engine.servers.schema.body import Body, parse_body
from engine.servers.schema.dialects.reading import Reading
from engine.servers.serving.admission import Lifecycle, Ticket

if TYPE_CHECKING:
    from engine.core.config_presets import PresetTable
    from engine.routing.manage import ModelManager
    from engine.servers.serving.interp_results import ResultStore
    from engine.servers.storage.objects import ObjectStore

# Seconds after which clients should retry while the model loads or the engine restarts.
NOT_READY_RETRY_S = 5.0
# No text of a prompt has more bytes per token than this, except for long runs of one character.
MAX_BYTES_PER_TOKEN = 16
_MAX_NAMED_MODELS = 20
WATCH_INTERVAL_S = 0.5
PAST_INTERVAL_S = 2.0
NUM_PAST = 150  # five minutes
T = TypeVar("T")
Check = Callable[[Request], Awaitable[None]]
# Entry of the ASGI scope with the model that the path of a request names. It replaces the model in
# the body.
DEPLOYMENT = "engine.deployment"
# Characters that are replaced in warnings. Warnings may quote a client's text and are sent in a
# header, which allows only printable ASCII.
_UNPRINTABLE = re.compile(r"[^ -~]")
# What huggingface_hub calls the model of a chat if it has only an address.
NAMELESS = "tgi"


class Component(Protocol):
    """A background component that starts and stops with the server."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class EngineWatcher:
    """Copies the engine's counters into the server's metrics, periodically and whenever the metrics
    are read. It sends no request to the engine, because the backend already has the counters.
    """

    def __init__(self, backend: BackendHolder, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics
        self._num_restarts = self._num_revived = 0
        # What the live view shows of the time before it was opened: times with statistics.
        self.past: deque[tuple[float, EngineStats]] = deque(maxlen=NUM_PAST)

    async def run(self) -> None:
        """Call `observe` periodically until cancelled."""
        while True:
            self.observe()
            await asyncio.sleep(WATCH_INTERVAL_S)

    def observe(self) -> None:
        """Update the metrics from the backend's current statistics."""
        backend = self._backend.current
        health, stats = backend.health(), backend.stats()
        for _ in range(health.num_restarts - self._num_restarts):
            self._metrics.engine_restarted(backend.totals_survive_restarts)
        self._num_restarts = health.num_restarts
        self._metrics.requests_revived(max(0, health.num_revived - self._num_revived))
        self._num_revived = health.num_revived
        if stats is not None:
            self._metrics.observe(stats)
            now = time.monotonic()
            if not self.past or now - self.past[-1][0] >= PAST_INTERVAL_S:
                self.past.append((now, stats))
        self._metrics.set_ready(health.ready)


@dataclass(frozen=True)
class Services:
    """What all routes share: the settings, the backend, admission, keys and quotas, with helpers
    for handling a request.
    """

    settings: Settings
    holder: BackendHolder
    metrics: Metrics
    lifecycle: Lifecycle
    watcher: EngineWatcher
    keys: KeyRing
    quotas: Quotas
    rebuild: Callable[[], InferenceBackend] | None = None  # builds the first backend again
    reread: Callable[[], Settings] | None = None  # reads the current settings again
    components: list[Component] = field(default_factory=list)  # started in this order
    # Defaults of models by id: those of the configuration file, and those that clients have made.
    presets: dict[str, "PresetTable"] = field(default_factory=dict)
    history: RequestHistory = field(default_factory=RequestHistory)

    @functools.cached_property
    def objects(self) -> "ObjectStore":
        """The store of responses, conversations and chat completions. Most servers store none."""
        from engine.servers.storage.objects import ObjectStore

        made = ObjectStore(self.settings.storage)
        self.components.append(made.database)
        return made

    @functools.cached_property
    def interp_results(self) -> "ResultStore":
        from engine.servers.serving.interp_results import (
            ResultStore,  # imported late: few servers need it
        )

        return ResultStore(self.settings.interp)

    @property
    def backend(self) -> InferenceBackend:
        return self.holder.current

    @functools.cached_property
    def models(self) -> "ModelManager":
        from engine.routing.manage import ModelManager  # imported late: few servers change models

        return ModelManager(self.holder, self.settings, self.metrics.registry, self.rebuild)

    async def admit(self, request: Request) -> Ticket:
        """Admit the request, or raise without waiting. The caller must close the returned
        ticket.
        """
        principal, record = principal_of(request), record_of(request.scope)
        if not self.holder.current.is_ready:
            raise self._not_ready(principal)
        ticket = Ticket(self.lifecycle, self.metrics, record, principal.name)
        if principal.limits is NO_LIMITS and not self.quotas.limits_all:
            return ticket
        announced = request.headers.get("content-length", "")
        num_bytes = int(announced) if announced.isdecimal() and len(announced) < 12 else 0
        try:
            ticket.hold(await self.quotas.enter(principal, num_bytes, record.limit_headers))
        except BaseException:
            await ticket.close()
            raise
        return ticket

    def _not_ready(self, principal: Principal) -> UnavailableError:
        # The detail may name models that a limited key may not know of.
        why = f": {self.backend.health().detail.rstrip('.')}" if principal.models is None else ""
        return UnavailableError(f"The model is not ready{why}.", retry_after=NOT_READY_RETRY_S)

    async def admitted(self, request: Request) -> AsyncIterator[Ticket]:
        """FastAPI dependency that admits a request. It releases the request's place when the last
        byte of the response has been sent.
        """
        ticket = await self.admit(request)
        try:
            yield ticket
        finally:
            await ticket.close()

    async def read(self, request: Request, kind: type[Body], is_lenient: bool = False) -> Body:
        """Read the request body. If `is_lenient`, its Content-Type does not matter, and parameters
        that this server does not have only cause a warning, as Ollama's clients expect.
        """
        on_read = functools.partial(self.note_words, request)
        parse = functools.partial(parse_body, kind, on_read=on_read, ignores=is_lenient)
        return await self.read_as(request, parse, is_lenient)

    async def read_chosen(
        self, request: Request, choose: Callable[[dict[str, Any]], type[Body]]
    ) -> Body:
        """Like `read`, for a route whose bodies have several forms. `choose` finds the form."""
        on_read = functools.partial(self.note_words, request)
        return await self.read_as(request, lambda raw: parse_body(choose(raw), raw, on_read))

    def note_words(self, request: Request, reading: Reading) -> None:
        record_of(request.scope).sent_as = reading.sent_as
        for param, message in reading.warnings:
            self.warn(request, param, message)

    async def read_with(self, request: Request, kind: type[Body], field: str) -> tuple[Body, Any]:
        """Like `read`. Also returns the value of `field` as the client sent it."""
        on_read = functools.partial(self.note_words, request)

        def parse(raw: dict[str, Any]) -> tuple[Body, Any]:
            return parse_body(kind, raw, on_read), raw.get(field)

        return await self.read_as(request, parse)

    async def read_as(
        self,
        request: Request,
        parse: Callable[[dict[str, Any]], T],
        any_type: bool = False,
        decode: Callable[[bytes], dict[str, Any]] = decode_object,
    ) -> T:
        """Read the request body and return `parse(body)`. If `any_type`, the body is read as JSON
        whatever its Content-Type is, unless a browser sent it. `decode` is for bodies with more
        than JSON.
        """
        max_bytes = self.settings.server.body_limit_mb * 2**20
        try:
            return await read_parsed(request, max_bytes, parse, any_type, decode)
        except PayloadTooLargeError as error:
            longest = max((card.max_model_len for card in self.backend.models()), default=0)
            if not 0 < longest * MAX_BYTES_PER_TOKEN < max_bytes:
                raise
            raise PromptTooLargeError(
                f"{error.message} This model's maximum context length is {longest} tokens."
            ) from None

    def find_model(self, name: str | None, principal: Principal) -> ModelCard:
        """The model of this name, if `principal` may use it. Without a name, the default model."""
        return self.with_preset(self._resolve(name, principal).card)

    def models_for(self, principal: Principal) -> list[ModelCard]:
        """The models and adapters that the key may use. No answer to its requests may name
        others.
        """
        return [card for card in self.backend.models() if principal.may_use(card)]

    def with_preset(self, card: ModelCard) -> ModelCard:
        """The card with the defaults of the model's preset, if there is one."""
        if not self.presets or (table := self.presets.get(card.root or card.id)) is None:
            return card
        preset = Preset(
            system=table.system,
            template_options=table.template_options,
            parameters=table.defaults,
        )
        return msgspec.structs.replace(card, preset=preset)

    def choose_model(self, request: Request, name: str | None) -> ModelCard:
        """The model that will answer. Warns the client if it is not the requested model. The name
        may be left out if only one model is served.
        """
        name, principal = request.scope.get(DEPLOYMENT, name), principal_of(request)
        if name == NAMELESS and self._allowed(name, principal) is None:
            name = None
        if name is None:
            self._check_one_model(principal)
        elif self._accepts_any_model(principal) and self._allowed(name, principal) is None:
            self.warn(request, "model", "is not served here, so the only model answers")
            name = None
        resolved = self._resolve(name, principal)
        if resolved.warning is not None:
            self.warn(request, "model", resolved.warning)
        record_of(request.scope).model = resolved.card.id
        return self.with_preset(resolved.card)

    def _served_ids(self, principal: Principal) -> list[str]:
        """The models that the key may use, without other names of the same model."""
        cards = self.models_for(principal)
        ids = {card.id for card in cards}
        return [card.id for card in cards if card.root is None or card.root not in ids]

    def _accepts_any_model(self, principal: Principal) -> bool:
        return self.settings.server.accept_any_model and len(self._served_ids(principal)) == 1

    def _check_one_model(self, principal: Principal) -> None:
        served = self._served_ids(principal)
        if len(served) > 1:
            known = ", ".join(served[:_MAX_NAMED_MODELS])
            raise InvalidRequestError(
                f"model is needed, because several models are served: {known}.", param="model"
            )

    def _allowed(self, name: str | None, principal: Principal) -> Resolved | None:
        """The model that answers for this name, if the key may use it. A model that it may not use
        is like one that is not there.
        """
        if principal.models is not None:
            name = next(iter(self._served_ids(principal)), "") if name is None else name
            if name not in principal.models:
                return None
        resolved = self.backend.resolve(name)
        if resolved is None or principal.may_use(resolved.card):
            return resolved
        if resolved.card.id == name or resolved.warning is None:
            return None
        # Another model would answer for this one, and the key may not use it.
        raise UnavailableError(f"{name} is not ready.", retry_after=NOT_READY_RETRY_S)

    def _resolve(self, name: str | None, principal: Principal) -> Resolved:
        resolved = self._allowed(name, principal)
        if resolved is not None:
            return resolved
        cards = self.models_for(principal)
        known = ", ".join(card.id for card in cards[:_MAX_NAMED_MODELS]) or "none"
        raise NotFoundError(
            f"There is no such model here. Available: {known}.",
            param="model",
            code="model_not_found",
        )

    def answers_as_llamacpp(self, request: Request) -> bool:
        """Whether an answer in OpenAI's form is as from llama.cpp: on the paths that only llama.cpp
        has, and on all paths of a server that speaks no other server's dialect.
        """
        is_own = request.scope["path"] in LLAMACPP_PATHS
        return is_own or self.settings.server.dialects == ("llamacpp",)

    def warn(self, request: Request, param: str, message: str) -> None:
        """Warn the client that a parameter had no effect, or not its full effect. In `strict` mode,
        refuse the request instead.
        """
        record = record_of(request.scope)
        param = record.sent_as.get(param, param)
        if self.settings.server.strict:
            raise InvalidRequestError(
                f"{param}: {message}, and this server is strict.",
                param=param,
                code="unsupported_parameter",
            )
        warning = _UNPRINTABLE.sub("?", f"{param}: {message}")
        record.warnings.append(warning)

    def require(self, card: ModelCard, capability: str, param: str, what: str) -> None:
        """Refuse a request with `param` if the model lacks `capability`. `what` completes the error
        message.
        """
        if capability not in card.capabilities:
            raise InvalidRequestError(
                f"{param} can't be used here: {card.id} {what}.",
                param=param,
                code="unsupported_parameter",
            )


class AdmittedRoute(APIRoute):
    """Any route of the application. If its handler only takes a request and a ticket, both are
    passed directly: the general solver of FastAPI takes longer than the checks themselves. OpenAPI
    and the handlers of errors see no difference.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        services = _services_of(self.dependant)
        if services is None:
            return super().get_route_handler()
        checks: list[Check] = [
            each.call
            for each in self.dependant.dependencies
            if each.name is None and each.call is not None
        ]
        admit, handler = services.admit, self.endpoint

        async def handle(request: Request) -> Response:
            for check in checks:
                await check(request)
            ticket = await admit(request)
            # This stack is left when the response has been sent.
            request.scope["fastapi_inner_astack"].push_async_callback(ticket.close)
            response: Response = await handler(request, ticket)
            return response

        return handle


def _services_of(dependant: Dependant) -> Services | None:
    """The services that admit the requests of a route. None if its handler needs other things."""
    more = (
        *(dependant.path_params, dependant.query_params, dependant.header_params),
        *(dependant.cookie_params, dependant.body_params),
    )
    named = [each for each in dependant.dependencies if each.name is not None]
    if any(more) or len(named) != 1 or dependant.request_param_name != "request":
        return None
    services = getattr(named[0].call, "__self__", None)
    is_ticket = isinstance(services, Services) and named[0].call == services.admitted
    return services if is_ticket else None


def new_completion_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


def json_bytes(body: bytes) -> Response:
    """A response whose body is JSON that is already encoded."""
    return Response(body, media_type="application/json")


def json_response(body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")
