"""Reads from the settings which backend serves the model, and with which engine options.

This module imports little, because the engine process gets its options before the rest of the
frontend is loaded.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.core.config_schema import Settings
from engine.core.config_types import TierSettings
from engine.core.errors import ConfigError
from engine.core.store.model_store import default_name
from engine.ipc.options import MIB, EngineOptions, PeerOptions, TierOptions

if TYPE_CHECKING:
    from engine.backends.base import BackendConfig
    from engine.core.config_presets import PresetTable

# Each is a package below `engine`.
FRAMEWORKS = ("native", "torch", "jax", "tinygrad")
VALIDATOR = "engine.backends.custom.validation:validate_model"
# Options that `engine admin swap` may change.
CHANGEABLE = tuple(
    name for name in EngineOptions.__struct_fields__ if name not in ("model_path", "framework")
)
NATIVE_MODULE = "engine.native._native"
NVIDIA_DEVICE = Path("/dev/nvidiactl")  # present if a CUDA driver is loaded
# GPUs that "auto" does not choose: of Windows' Linux, and of Jetson boards.
OTHER_GPU_DEVICES = (Path("/dev/dxg"), Path("/dev/nvmap"))
AMD_DEVICE = Path("/dev/kfd")  # present if AMD's driver can run programs on a GPU


def default_backend(device: str, dtype: str) -> str:
    """The backend that is used if the settings name none. On a CPU, it is `native`. On a GPU, for
    16-bit dtypes, and if the native kernels were not built, it is `torch`.
    """
    has_torch = find_spec("torch") is not None
    wants_gpu = device.startswith("cuda") or (device == "auto" and _has_gpu())
    if wants_gpu or dtype in ("bfloat16", "float16"):
        return "torch" if has_torch or device != "auto" else "native"
    return "native" if find_spec(NATIVE_MODULE) is not None or not has_torch else "torch"


def _has_gpu() -> bool:
    """Whether a GPU's driver is loaded. An AMD GPU counts if PyTorch can use it."""
    if NVIDIA_DEVICE.exists():
        return True
    if not AMD_DEVICE.exists():
        return False
    from engine.core.store.gpus import has_rocm_torch

    return has_rocm_torch()


def check_device(device: str) -> None:
    """Refuse a GPU that is not there, before anything about the packages for it is said."""
    if device.startswith("cuda") and not _has_gpu():
        if any(each.exists() for each in (*OTHER_GPU_DEVICES, AMD_DEVICE)):
            return
        raise ConfigError(
            f"model.device is {device}, and no driver of a GPU is loaded on this machine: leave"
            " --device out to run on the CPU, or install the driver (`engine doctor` shows what is"
            " there)",
            param="model.device",
        )


def engine_options(settings: Settings, framework: str, path: Path | None = None) -> EngineOptions:
    """The engine options from the settings. `path`, if given, replaces the model path there.

    An option that has the name of a setting of its model, cache, performance or shards has the
    setting's value. Only options with another name, unit or type are listed here.
    """
    cache, performance, model = settings.cache, settings.performance, settings.model
    shards, tuning = settings.shards, settings.finetuning
    options = {
        name: value
        for section in (model, cache, performance, shards)
        for name, value in section
        if name in EngineOptions.__struct_fields__
    }
    options |= {
        "model_path": str(path or model.model_path),
        "framework": framework,
        "max_seq_len": model.max_sequence_length,
        "draft_model": model.draft_model or "",
        "max_slots": performance.batch_size or 0,
        "max_batch_tokens": performance.max_batch_tokens or 0,
        "max_queued": performance.max_queued_requests,
        "max_revivals": settings.server.max_revivals if settings.server.resume_requests else 0,
        "pool_bytes": _bytes(performance.memory_pool_size_mb),
        "training_device": "" if tuning.device == "cpu" else tuning.device,
        "training_bytes": _bytes(tuning.memory_mb),
        "shard_listen": shards.listen or "",
        "shard_token": shards.token.get_secret_value() if shards.token is not None else "",
        "cache_enabled": cache.enabled,
        "cache_bytes": _bytes(cache.max_size_mb),
        "cache_max_sequences": cache.max_sequences,
        "cache_ttl_s": cache.ttl_seconds,
        "tiers": tier_options(settings.tiers),
        "peers": _peer_options(settings),
        "adapters": _adapters(settings),
        "adapter_bytes": _bytes(performance.adapter_memory_mb),
        "log_level": settings.logging.level,
        "log_format": settings.logging.format,
    }
    return EngineOptions(**options)


def _bytes(megabytes: int | None) -> int | None:
    return None if megabytes is None else megabytes * MIB


def _adapters(settings: Settings) -> dict[str, str]:
    """The paths of the LoRA adapters, by name. A server with several models divides them itself."""
    own = settings.model.name or default_name(settings.model.model_path)
    for name, table in settings.tables.adapters.items():
        if table.base not in (None, own) and not settings.tables.backends:
            raise ConfigError(
                f"adapters.{name}.base is '{table.base}', and this server's model is '{own}'",
                param=f"adapters.{name}.base",
            )
    tables = {name: table.path for name, table in settings.tables.adapters.items()}
    return tables | settings.model.adapters


def options_of(framework: str, config: "BackendConfig") -> EngineOptions:
    """Build `EngineOptions` from the arguments of a backend. If an argument is unknown, an error
    names the argument.
    """
    fields = {"model_path": config.model_name, "framework": framework, **config.backend_args}
    unknown = sorted(fields.keys() - set(EngineOptions.__struct_fields__))
    if unknown:
        known = ", ".join(EngineOptions.__struct_fields__)
        raise ConfigError(f"unknown backend argument '{unknown[0]}'; there are: {known}")
    try:
        return msgspec.convert(fields, EngineOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"backend arguments: {error}") from error


def changed_options(
    options: EngineOptions, model: str, changes: Mapping[str, Any]
) -> EngineOptions:
    """The options with another model and with `changes`. If a name in `changes` is unknown, an
    error says so.
    """
    unknown = changes.keys() - set(CHANGEABLE)
    if unknown:
        known = ", ".join(CHANGEABLE)
        raise ConfigError(f"unknown option '{min(unknown)}'; there are: {known}", param="options")
    fields = msgspec.structs.asdict(options) | {"model_path": model} | dict(changes)
    try:
        return msgspec.convert(fields, EngineOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options: {error}", param="options") from error


def tier_options(tiers: TierSettings) -> TierOptions | None:
    """The options of the cache tiers. None if the settings name no tier."""
    if tiers.host_mb is None and tiers.disk_path is None and tiers.redis_url is None:
        return None
    options = {name: value for name, value in tiers if name in TierOptions.__struct_fields__}
    options |= {
        "host_bytes": (tiers.host_mb or 0) * MIB,
        "disk_path": str(tiers.disk_path or ""),
        "disk_bytes": tiers.disk_mb * MIB if tiers.disk_path is not None else 0,
        "redis_url": tiers.redis_url.get_secret_value() if tiers.redis_url is not None else "",
        "redis_bytes": tiers.redis_mb * MIB if tiers.redis_url is not None else 0,
    }
    return TierOptions(**options)


def _peer_options(settings: Settings) -> PeerOptions | None:
    nodes, files = settings.nodes, settings.server.tls_files
    if nodes.role == "both":
        return None
    cert, key = ("", "") if files is None else map(str, files)
    return PeerOptions(
        role=nodes.role,
        listen=nodes.block_listen or "",
        host=nodes.block_host or "",
        cert_file=cert,
        key_file=key,
        kept_bytes=nodes.block_memory_mb * MIB,
    )


def backend_name(settings: Settings) -> str:
    name = settings.model.backend
    if name != "auto":
        return name
    performance = settings.performance
    if performance.tensor_parallel_size * performance.pipeline_parallel_size > 1:
        return "torch"
    return default_backend(settings.model.device, settings.model.dtype)


def preset_of(settings: Settings) -> "PresetTable | None":
    """The `[presets.ID]` table of the model that the settings name, by the id that clients use."""
    model_id = settings.model.name or default_name(settings.model.model_path)
    return settings.tables.presets.get(model_id)


def has_engine(backend: str) -> bool:
    """Whether a backend is one of the engine's own frameworks, which run in an engine process."""
    return backend in FRAMEWORKS
