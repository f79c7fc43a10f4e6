"""Builds a server. The settings select a backend, and the application serves this backend."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from engine.backends.base import InferenceBackend
from engine.backends.custom.base_custom import CustomBackend
from engine.backends.custom.engine_settings import (
    backend_name,
    check_device,
    engine_options,
    preset_of,
)
from engine.backends.factory import make_backend
from engine.core.config_schema import Settings
from engine.core.errors import ConfigError
from engine.core.observability.metrics import Metrics
from engine.core.registry.backend_registry import backend_class
from engine.core.store.model_store import default_name
from engine.ipc.engine_process import EngineProcess
from engine.servers.app import create_app

Reread: TypeAlias = Callable[[], Settings]

if TYPE_CHECKING:
    from fastapi import FastAPI


def build_backend(
    settings: Settings, *, in_process: bool = False, process: EngineProcess | None = None
) -> InferenceBackend:
    """Create the backend that the settings select, without starting it. `process` is an engine
    process that was started early. The backend uses it, or discards it if it needs none.
    """
    name = backend_name(settings)
    kind = backend_class(name)
    model = settings.model.model_path
    served_name = settings.model.name or default_name(model)
    if issubclass(kind, CustomBackend):
        check_device(settings.model.device)
        if settings.model.options:
            raise ConfigError(
                f"model.options: '{name}' is set up by other settings; see `engine serve --help`",
                param="model.options",
            )
        options, preset = engine_options(settings, name), preset_of(settings)
        return kind(
            model,
            options=options,
            served_name=served_name,
            chat_template=None if preset is None else preset.template,
            in_process=in_process,
            process=process,
        )
    if process is not None:
        process.discard()
    if (preset := preset_of(settings)) is not None and preset.template is not None:
        raise ConfigError(f"presets: '{name}' can't be given another template", param="template")
    return make_backend(name, model, _named(name, kind, settings))


def _named(name: str, kind: type[InferenceBackend], settings: Settings) -> dict[str, Any]:
    """The options of a backend, including the model name for clients if the settings have one."""
    options, wanted = settings.model.options, settings.model.name
    if wanted is None:
        return options
    if not any(field.name == "served_model_name" for field in fields(kind.config_type)):
        raise ConfigError(
            f"model.name: '{name}' can't give its model another name; a configuration file can,"
            f' with [models."{wanted}"]',
            param="model.name",
        )
    return {"served_model_name": wanted} | options


@dataclass(frozen=True, slots=True)
class Server:
    """An application whose backend is not started yet. `loading` names the models that it will
    load, for messages to the user.
    """

    app: "FastAPI"
    loading: str
    model_id: str  # the expected id of the first model; the real id is known once it is loaded

    def first_call(self) -> tuple[str, dict[str, Any]]:
        """An example request that the first model can answer, as a URL path and a JSON body."""
        cards = self.app.state.services.backend.models()
        model = {"model": cards[0].id if cards else self.model_id}
        can = cards[0].capabilities if cards else ("chat",)
        if "chat" in can:
            messages = [{"role": "user", "content": "Hello!"}]
            return "/v1/chat/completions", model | {"messages": messages}
        if "completions" in can:
            return "/v1/completions", model | {"prompt": "Hello"}
        return "/v1/embeddings", model | {"input": "Hello!"}


def build_server(
    settings: Settings, process: EngineProcess | None = None, reread: Reread | None = None
) -> Server:
    """Build the whole server except its socket. The backend starts when the server runs."""
    backend = build_backend(settings, process=process)
    model = settings.model.model_path
    is_ours = isinstance(backend, CustomBackend)
    model_id = settings.model.name or (default_name(model) if is_ours else model)
    metrics = Metrics(model_id)
    app = create_app(
        settings,
        _plugged(settings, _unloadable(settings, backend, model_id, metrics) or backend, metrics),
        metrics,
        starts_soon=True,
        rebuild=lambda: build_backend(settings),
        reread=reread,
    )
    return Server(app, model_id, model_id)


def _unloadable(
    settings: Settings, backend: InferenceBackend, model_id: str, metrics: Metrics
) -> InferenceBackend | None:
    """A router around the single backend, which can unload the backend when it is idle or memory is
    short. None if the settings do not ask for this.
    """
    if settings.server.memory_budget_mb is None and settings.server.idle_unload_s is None:
        return None
    from engine.routing.manage import router_of_one

    first = [backend]
    return router_of_one(
        model_id,
        backend_name(settings),
        lambda: first.pop() if first else build_backend(settings),
        settings,
        metrics.registry,
    )


def build_routed_server(settings: Settings, origin: str, reread: Reread | None = None) -> Server:
    """Build a server whose router has all backends that the configuration file `origin` lists."""
    from engine.routing.build import build_router

    ids = list(settings.tables.models)
    metrics = Metrics(",".join(ids))
    router = build_router(settings, metrics.registry, origin)
    app = create_app(
        settings, _plugged(settings, router, metrics), metrics, starts_soon=True, reread=reread
    )
    return Server(app, ", ".join(replica.name for replica in router.replicas), ids[0])


def _plugged(settings: Settings, backend: InferenceBackend, metrics: Metrics) -> InferenceBackend:
    """The backend, wrapped in the plugins that the settings name."""
    if not settings.tables.plugins:
        return backend
    from engine.plugins.build import plug_in

    return plug_in(backend, settings.tables.plugins, metrics.registry)
