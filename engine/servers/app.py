"""The FastAPI application: its routes, and the ASGI layers that every request passes.

From the outside in, a request passes: request id and log, browser guard, CORS if enabled, routing,
authentication, the route. `RootPath`, if configured, is the outermost layer. All layers are plain
ASGI. With Starlette's `BaseHTTPMiddleware`, a route would not learn that its client has
disconnected.
"""

import asyncio
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.backends.base import BackendHolder, InferenceBackend
from engine.core.config_schema import Settings
from engine.core.config_types import Dialect
from engine.core.key_file import NO_LIMITS
from engine.core.observability.metrics import Metrics
from engine.core.observability.tracing import new_telemetry
from engine.servers.access.auth import Authenticator, BrowserGuard, KeyRing
from engine.servers.access.origins import AllowedOrigins, CorsLayer
from engine.servers.access.quotas import AuthThrottle, Quotas
from engine.servers.http.errors import install_error_handlers
from engine.servers.http.request_log import RequestHistory, RequestLog
from engine.servers.serving.admission import Lifecycle
from engine.servers.serving.services import AdmittedRoute, EngineWatcher, Services

if TYPE_CHECKING:
    from engine.core.observability.otel import Telemetry
    from engine.routing.nodes.manager import NodeManager
    from engine.servers.http.recorder import Recorder


def add_routes(app: FastAPI, services: Services, target: str) -> None:
    """Call the function that `target` names as "module:function". It adds routes to `app`."""
    module, _, function = target.partition(":")
    getattr(import_module(f"engine.servers.{module}"), function)(app, services)


class LateRoutes(BaseRoute):
    """Routes that are added after startup. They are added once the model is ready, or as soon as a
    request may need one of them. Until then, this route takes every request whose path and method
    no other route has.
    """

    path = "/{path:path}"

    def __init__(self, app: FastAPI, services: Services, targets: Sequence[str]) -> None:
        self._app = app
        self._services = services
        self._targets = list(targets)
        self._adding = asyncio.Lock()
        if targets:
            app.router.routes.append(self)

    async def add(self) -> None:
        """Import and add all late routes, and start the background components that they need."""
        async with self._adding:
            while self._targets:
                target = self._targets[0]
                module = target.partition(":")[0]
                await asyncio.to_thread(import_module, f"engine.servers.{module}")
                known = len(self._services.components)
                add_routes(self._app, self._services, target)
                for component in self._services.components[known:]:
                    await component.start()
                self._targets.pop(0)
            if self in self._app.router.routes:
                self._app.router.routes.remove(self)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # A router prefers a full match to an earlier route that only has the path.
        return (Match.FULL if scope["type"] == "http" else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.add()
        scope.pop("route", None)
        await self._app.router(scope, receive, send)


class RootPath:
    """ASGI layer that serves all paths also below `prefix`, which a proxy leaves in them."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            scope = {**scope, "root_path": self._prefix}
        await self._app(scope, receive, send)


# Functions that add routes, as "module:function" with modules below `engine.servers`. If
# `create_app` is called with `starts_soon`, those in LATE run only after startup.
EARLY = (
    "openai.completions:add_chat_routes",
    "openai.completions:add_completions_routes",
    "openai.models:add_models_routes",
    "ops.probes:add_health_routes",
)
METRICS = "ops.probes:add_metrics_routes"
LATE = (
    "openai.models:add_model_routes",
    "openai.stored_chats:add_stored_chats_routes",
    "responses.routes:add_responses_routes",
    "openai.completions:add_fim_routes",
    "openai.embeddings:add_embeddings_routes",
    "openai.rerank:add_rerank_routes",
    "anthropic.routes:add_anthropic_routes",
    "openai.moderations:add_moderations_routes",
    "openai.tokenize:add_tokenize_routes",
    "capabilities:add_capabilities_routes",
    "files_and_batches:add_files_and_batches_routes",
    "fine_tuning.models:add_fine_tuned_models_routes",
    "generate:add_generate_routes",
    "interp.routes:add_interp_routes",
    "ops.admin:add_admin_routes",
    "ops.admin_models:add_admin_models_routes",
    "ops.adapters:add_adapter_routes",
    "ops.admin_control:add_admin_control_routes",
    "ops.admin_control:add_plugins_routes",
    "ops.requests:add_requests_routes",
    "ops.live:add_live_routes",
    "ops.replay:add_replay_routes",
    "openapi:add_openapi_routes",
)
# Like LATE. It comes before the routes of other servers' APIs, one of which has the path `/` too.
PAGE = "ui.routes:add_ui_routes"
# Like LATE, if nodes may join the server.
NODES = "ops.admin_nodes:add_admin_nodes_routes"
# Like LATE, for the APIs of other servers. Each is added only if `server.dialects` has its name.
DIALECTS: dict[Dialect, tuple[str, ...]] = {
    "llamacpp": (
        "llamacpp.completion:add_completion_routes",
        "llamacpp.state:add_state_routes",
        "llamacpp.text:add_text_routes",
        "llamacpp.vectors:add_vectors_routes",
        "llamacpp.metrics:add_llamacpp_metrics",
    ),
    "vllm": (
        "vllm_api.routes:add_vllm_routes",
        "vllm_api.sleeping:add_sleep_routes",
        "vllm_api.batch_chat:add_batch_chat_routes",
    ),
    "sglang": ("sglang_api.routes:add_sglang_routes",),
    "ollama": ("ollama.routes:add_ollama_routes",),
    "azure": ("azure:add_azure_routes",),
    "kserve": ("kserve.routes:add_kserve_routes",),
    "huggingface": ("huggingface.routes:add_huggingface_routes",),
}
# Like DIALECTS, for other names of our routes. They are added last, when our routes are there.
OTHER_NAMES: dict[Dialect, str] = {"llamacpp": "llamacpp.state:add_alias_routes"}

# Response headers that SDKs read. Browsers hide them from web pages of other origins, unless CORS
# exposes them.
EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-engine-warnings", "retry-after", "x-should-retry"),
    *("content-disposition", "x-engine-backend"),
    *("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    *("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
)


def create_app(
    settings: Settings,
    backend: InferenceBackend,
    metrics: Metrics,
    *,
    starts_soon: bool = False,
    rebuild: Callable[[], InferenceBackend] | None = None,
    reread: Callable[[], Settings] | None = None,
) -> FastAPI:
    """Build the application over `backend`. The caller starts and stops the backend (see `run.py`).

    If `starts_soon`, some routes are only added after startup, so that the server is ready sooner.
    `rebuild` builds the backend again after it was unloaded. `reread` reads the settings again, for
    a reload.
    """
    services = _services(settings, backend, metrics, rebuild, reread)
    telemetry = new_telemetry(settings.tracing)
    if telemetry is not None:
        services.components.append(telemetry)
    throttle = AuthThrottle(settings.limits.auth_failures_per_minute)
    authenticator = Authenticator(settings, services.keys, throttle)
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        dependencies=[Depends(authenticator)],
        middleware=_layers(services, telemetry),
    )
    app.router.route_class = AdmittedRoute
    app.state.services = services
    app.state.nodes = nodes = _nodes(services)
    if nodes is not None:
        services.components.append(nodes)
    install_error_handlers(app)
    others = _late_targets(settings.server.dialects, has_nodes=nodes is not None)
    early = [*EARLY, *(() if starts_soon else others)]
    for target in (*early, METRICS) if settings.metrics.enabled else early:
        add_routes(app, services, target)
    app.state.late_routes = LateRoutes(app, services, others if starts_soon else ())
    if settings.server.grpc_port is not None:
        # Imported late: few servers serve gRPC, and the library that it needs is an extra.
        from engine.servers.kserve.grpc_server import GrpcServer

        services.components.append(GrpcServer(app, settings.server, authenticator.identify))
    if settings.server.root_path:
        app.add_middleware(RootPath, prefix=settings.server.root_path)
    return app


def _services(
    settings: Settings,
    backend: InferenceBackend,
    metrics: Metrics,
    rebuild: Callable[[], InferenceBackend] | None,
    reread: Callable[[], Settings] | None,
) -> Services:
    lifecycle = Lifecycle(settings.server.max_concurrent_requests, settings.logging.slow_request_s)
    metrics.watch_in_flight(lambda: len(lifecycle.pumps))
    holder = BackendHolder(backend)
    watcher = EngineWatcher(holder, metrics)
    keys, quotas = KeyRing(settings.server), Quotas(settings.limits)
    recorder = _recorder(settings)
    services = Services(
        *(settings, holder, metrics, lifecycle, watcher, keys, quotas, rebuild, reread),
        history=RequestHistory(settings.requests.keep, recorder),
    )
    if recorder is not None:
        services.components.append(recorder)
    services.presets.update(settings.tables.presets)
    if keys.entries or not NO_LIMITS.over(settings.limits).is_empty:
        services.components.append(quotas)
    if settings.cache.warm_file is not None:
        # This import is here, because few servers warm their prefix cache from a file.
        from engine.servers.ops.warming import WarmStart

        services.components.append(WarmStart(services, settings.cache.warm_file))
    return services


def _late_targets(dialects: Sequence[Dialect], *, has_nodes: bool) -> list[str]:
    """The functions that add routes which may be added after startup, as for `add_routes`."""
    # Other servers' routes are matched first, because some of our paths match theirs too.
    return [
        PAGE,
        *chain.from_iterable(DIALECTS[each] for each in dialects),
        *LATE,
        *((NODES,) if has_nodes else ()),
        *(OTHER_NAMES[each] for each in dialects if each in OTHER_NAMES),
    ]


def _nodes(services: Services) -> "NodeManager | None":
    settings, server = services.settings, services.settings.server
    token = server.node_token
    if token is None:
        return None
    # Imported late: few servers have nodes.
    from engine.routing.metrics import PrefillCollector
    from engine.routing.nodes.manager import NodeManager

    max_revivals = server.max_revivals if server.resume_requests else 0
    least = settings.nodes.min_prefill_tokens
    nodes = NodeManager(services.holder, token.get_secret_value(), max_revivals, least)
    services.metrics.registry.register(PrefillCollector(lambda: nodes.prefills))
    return nodes


def _recorder(settings: Settings) -> "Recorder | None":
    if not settings.requests.record:
        return None
    from engine.servers.http.recorder import Recorder  # imported late: few servers record requests

    return Recorder(settings.storage.directory / "recorded", settings.requests.max_recorded)


def _layers(services: Services, telemetry: "Telemetry | None") -> list[Middleware]:
    settings = services.settings
    layers = [
        Middleware(
            RequestLog,
            settings=settings,
            metrics=services.metrics,
            backends=services.holder,
            history=services.history,
            telemetry=telemetry,
        ),
        Middleware(BrowserGuard, server=settings.server),
    ]
    if settings.server.enable_cors:
        origins = AllowedOrigins(settings.server.allowed_origins)
        layers.append(Middleware(CorsLayer, origins=origins, exposed=EXPOSED_HEADERS))
    return layers
