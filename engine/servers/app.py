"""The FastAPI application: routes, and the layers that every request passes.

From the outside in: request id and log, browser guard, CORS if enabled, routing, the key, then the
route. All layers are plain ASGI; Starlette's `BaseHTTPMiddleware` would hide a client's disconnect
from the route.
"""

from fastapi import Depends, FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from engine.backends.base import InferenceBackend
from engine.core.config_schema import Settings
from engine.core.observability.metrics import Metrics
from engine.servers.anthropic.routes import add_anthropic_routes
from engine.servers.auth import Authenticator
from engine.servers.batches.routes import add_files_and_batches_routes
from engine.servers.errors import install_error_handlers
from engine.servers.generate import add_generate_routes
from engine.servers.guard import BrowserGuard
from engine.servers.health import add_health_routes, add_metrics_routes
from engine.servers.lifecycle import Lifecycle
from engine.servers.openai.capabilities import add_capabilities_routes
from engine.servers.openai.chat import add_chat_routes
from engine.servers.openai.completions import add_completions_routes
from engine.servers.openai.embeddings import add_embeddings_routes
from engine.servers.openai.models import add_models_routes
from engine.servers.openai.rerank import add_rerank_routes
from engine.servers.openapi import add_openapi_routes
from engine.servers.request_log import RequestLog
from engine.servers.responses.routes import add_responses_routes
from engine.servers.services import Services
from engine.servers.tokenize import add_tokenize_routes
from engine.servers.watcher import EngineWatcher

# What SDKs read of an answer, which a browser hides from a page of another origin otherwise.
EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-engine-warnings", "retry-after", "x-should-retry"),
    "content-disposition",
)


def create_app(settings: Settings, backend: InferenceBackend, metrics: Metrics) -> FastAPI:
    """The application over `backend`, which somebody else starts and stops (see `run.py`)."""
    lifecycle = Lifecycle(settings.server.max_concurrent_requests, settings.logging.slow_request_s)
    services = Services(settings, backend, metrics, lifecycle, EngineWatcher(backend, metrics))
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        dependencies=[Depends(Authenticator(settings))],
        middleware=_layers(settings, metrics),
    )
    app.state.services = services
    install_error_handlers(app)
    add_chat_routes(app, services)
    add_completions_routes(app, services)
    add_models_routes(app, services)
    add_responses_routes(app, services)
    add_embeddings_routes(app, services)
    add_rerank_routes(app, services)
    add_anthropic_routes(app, services)
    add_tokenize_routes(app, services)
    add_capabilities_routes(app, services)
    add_files_and_batches_routes(app, services)
    add_generate_routes(app, services)
    add_health_routes(app, services)
    add_openapi_routes(app)
    if settings.metrics.enabled:
        add_metrics_routes(app, services)
    return app


def _layers(settings: Settings, metrics: Metrics) -> list[Middleware]:
    layers = [
        Middleware(RequestLog, settings=settings, metrics=metrics),
        Middleware(BrowserGuard, server=settings.server),
    ]
    if settings.server.enable_cors:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.server.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                # OpenAI's SDK sends a family of x-stainless-* headers; no cookies are in play.
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
            )
        )
    return layers
