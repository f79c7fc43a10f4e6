"""The composition root of a server: settings become a backend, a backend becomes an application."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.backends.base import InferenceBackend
from engine.backends.custom.base_custom import CustomBackend
from engine.backends.custom.engine_settings import backend_name, engine_options
from engine.backends.custom.runtime.engine_process import EngineProcess
from engine.backends.factory import make_backend
from engine.core.config_schema import Settings
from engine.core.errors import ConfigError
from engine.core.observability.metrics import Metrics
from engine.core.registry.backend_registry import backend_class
from engine.servers.app import create_app

if TYPE_CHECKING:
    from fastapi import FastAPI


def build_backend(
    settings: Settings, *, in_process: bool = False, process: EngineProcess | None = None
) -> InferenceBackend:
    """The backend that the settings name, not started yet. `process` waits to be its engine."""
    name = backend_name(settings)
    kind = backend_class(name)
    model = settings.model.model_path
    served_name = settings.model.name or Path(model).stem
    if issubclass(kind, CustomBackend):
        if settings.model.options:
            raise ConfigError(
                f"model.options: '{name}' is set up by other settings; see `engine serve --help`",
                param="model.options",
            )
        options = engine_options(settings, name)
        return kind(
            model,
            options=options,
            served_name=served_name,
            in_process=in_process,
            process=process,
        )
    if process is not None:
        process.discard()
    return make_backend(name, model, settings.model.options)


@dataclass(frozen=True, slots=True)
class Server:
    """An application, what it will load, and the id of the model to begin with."""

    app: "FastAPI"
    loading: str
    model_id: str


def build_server(settings: Settings, process: EngineProcess | None = None) -> Server:
    """Everything but the socket; the backend starts when the server runs."""
    backend = build_backend(settings, process=process)
    model_id = settings.model.name or Path(settings.model.model_path).stem
    app = create_app(settings, backend, Metrics(model_id), starts_soon=True)
    return Server(app, model_id, model_id)


def build_routed_server(settings: Settings, origin: str) -> Server:
    """As `build_server`, with all backends of the file `origin` behind a router."""
    from engine.routing.build import build_router

    ids = list(settings.tables.models)
    metrics = Metrics(",".join(ids))
    router = build_router(settings, metrics.registry, origin)
    app = create_app(settings, router, metrics, starts_soon=True)
    return Server(app, ", ".join(replica.name for replica in router.replicas), ids[0])
