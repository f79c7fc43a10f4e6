"""The composition root of a server: settings become a backend, a backend becomes an application."""

from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from engine.backends.base import BackendConfig, InferenceBackend
from engine.backends.custom.base_custom import CustomBackend
from engine.backends.custom.memory import MIB
from engine.backends.custom.options import EngineOptions
from engine.core.config_schema import Settings
from engine.core.observability.metrics import Metrics
from engine.core.registry.backend_registry import backend_class
from engine.servers.app import create_app

# What "auto" means on every machine today; the registry may know more.
DEFAULT_BACKEND = "torch"


def engine_options(settings: Settings, framework: str) -> EngineOptions:
    """The part of the settings that concerns the engine."""
    cache, performance, model = settings.cache, settings.performance, settings.model
    pool_mb = performance.memory_pool_size_mb
    return EngineOptions(
        model_path=str(model.model_path),
        framework=framework,
        device=model.device,
        dtype=model.dtype,
        max_seq_len=model.max_sequence_length,
        use_mmap=performance.use_mmap,
        threads=performance.threads,
        attention=performance.attention,
        max_slots=performance.batch_size,
        max_batch_tokens=performance.max_batch_tokens,
        max_queued=performance.max_queued_requests,
        pool_bytes=pool_mb * MIB if pool_mb is not None else None,
        block_size=cache.block_size,
        cache_enabled=cache.enabled,
        cache_bytes=cache.max_size_mb * MIB if cache.max_size_mb is not None else None,
        cache_max_sequences=cache.max_sequences,
        cache_ttl_s=cache.ttl_seconds,
        eviction_policy=cache.eviction_policy,
        log_level=settings.logging.level,
        log_format=settings.logging.format,
    )


def build_backend(settings: Settings, *, in_process: bool = False) -> InferenceBackend:
    """The backend that the settings name, not started yet."""
    name = DEFAULT_BACKEND if settings.model.backend == "auto" else settings.model.backend
    kind = backend_class(name)
    model = settings.model.model_path
    served_name = settings.model.name or Path(model).stem
    if issubclass(kind, CustomBackend):
        options = engine_options(settings, name)
        return kind(model, options=options, served_name=served_name, in_process=in_process)
    backend: InferenceBackend = kind(BackendConfig(model_name=model))
    return backend


@dataclass(frozen=True, slots=True)
class Server:
    """An application, and the id of the model that it will serve."""

    app: FastAPI
    model_id: str


def build_server(settings: Settings) -> Server:
    """Everything but the socket; the backend starts when the server runs."""
    backend = build_backend(settings)
    model_id = settings.model.name or Path(settings.model.model_path).stem
    return Server(create_app(settings, backend, Metrics(model_id)), model_id)
