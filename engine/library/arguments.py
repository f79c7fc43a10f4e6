"""The arguments of `LLM(...)`. Their names are those of vLLM's engine arguments.

An argument sets one of our settings, or accepts only values that are true of our engine anyway, or
is a hint that cannot change results. Any other argument is refused by name.
"""

import argparse
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from engine.core.errors import ConfigError
from engine.core.store.catalogue import DEFAULT_MODEL
from engine.core.suggestions import suggest

_MIB = 2**20
# Argument -> the setting that it sets. Values pass unchanged, unless `_VALUES` translates them.
_SETTINGS = {
    "backend": "model.backend",
    "block_size": "cache.block_size",
    "device": "model.device",
    "dtype": "model.dtype",
    "enable_prefix_caching": "cache.enabled",
    "gpu_memory_utilization": "performance.gpu_memory_utilization",
    "kv_cache_dtype": "cache.kv_dtype",
    "max_model_len": "model.max_sequence_length",
    "max_num_batched_tokens": "performance.max_batch_tokens",
    "max_num_seqs": "performance.batch_size",
    "quantization": "model.quantization",
    "pipeline_parallel_size": "performance.pipeline_parallel_size",
    "served_model_name": "model.name",
    "tensor_parallel_size": "performance.tensor_parallel_size",
}
_VALUES: dict[str, dict[Any, Any]] = {"dtype": {"half": "float16", "float": "float32"}}
# Argument -> the values that describe what the engine does anyway, and what to use instead.
_ALWAYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "convert": (("auto", "none", "embed"), "every model here can embed"),
    "cpu_offload_gb": ((0,), "weights are never offloaded"),
    "enable_chunked_prefill": ((True,), "prefill is always chunked"),
    "load_format": (("auto", "safetensors", "gguf"), "the format follows from the files"),
    "runner": (("auto", "generate", "pooling"), "the runner follows from the model"),
    "skip_tokenizer_init": ((False,), "the tokenizer is always loaded"),
    "task": (("auto", "generate", "embed", "score"), "the task follows from the call"),
    "tokenizer_mode": (("auto", "slow", "hf"), "the tokenizer follows from the model's files"),
    # A permission that is never used: no code of a model runs here.
    "trust_remote_code": ((True, False), ""),
}
# Arguments that change neither results nor settings here. The user is warned.
_HINTS = ("disable_log_stats", "enforce_eager", "swap_space")


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The arguments of `LLM`. None means that an argument is not given. `settings` has settings of
    the configuration file, with keys of the form `section.key`.
    """

    model: str = DEFAULT_MODEL
    settings: Mapping[str, Any] | None = None
    tokenizer: str | None = None
    revision: str | None = None
    seed: int | None = None
    backend: str | None = None
    block_size: int | None = None
    device: str | None = None
    dtype: str | None = None
    enable_prefix_caching: bool | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str | None = None
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    quantization: str | None = None
    served_model_name: str | None = None
    convert: str | None = None
    cpu_offload_gb: float | None = None
    enable_chunked_prefill: bool | None = None
    load_format: str | None = None
    pipeline_parallel_size: int | None = None
    runner: str | None = None
    skip_tokenizer_init: bool | None = None
    task: str | None = None
    tensor_parallel_size: int | None = None
    tokenizer_mode: str | None = None
    trust_remote_code: bool | None = None
    disable_log_stats: bool | None = None
    enforce_eager: bool | None = None
    swap_space: float | None = None

    @classmethod
    def of(cls, **given: Any) -> "EngineArgs":
        """Build from keyword arguments. An unknown argument that is not None is refused by name."""
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known and value is not None:
                raise ConfigError(
                    f"LLM has no argument {name}{suggest(name, known)}; leave it out, or set a"
                    ' setting of engine.toml by settings={"section.key": value}',
                    param=name,
                )
        return cls(**{name: value for name, value in given.items() if name in known})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each argument, such as `--max-model-len`, to a parser."""
        for field in fields(EngineArgs):
            if field.name == "settings":
                continue
            flag = "--" + field.name.replace("_", "-")
            kind: Any = (get_args(field.type) or (field.type,))[0]
            if kind is bool:
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
            else:
                parser.add_argument(flag, type=kind, default=field.default)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Build from parsed flags. Flags that are not engine arguments are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in known})

    def flags(self) -> dict[str, Any]:
        """The settings that the arguments set. Raises `ConfigError` for what is not supported."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        for name, (allowed, reason) in _ALWAYS.items():
            if name in given and given[name] not in allowed:
                raise ConfigError(f"{name}={given[name]!r}: {reason}", param=name)
        for name in _HINTS:
            if given.get(name):
                warnings.warn(f"{name} has no effect in this engine", stacklevel=4)
        if self.tokenizer not in (None, self.model):
            raise ConfigError(
                "tokenizer: a model is used with its own tokenizer; leave it out", param="tokenizer"
            )
        flags: dict[str, Any] = {"model.model_path": self.model}
        if self.revision is not None:
            flags["model.model_path"] = f"hf:{self.model.removeprefix('hf:')}@{self.revision}"
        for name, setting in _SETTINGS.items():
            if name in given:
                flags[setting] = _VALUES.get(name, {}).get(given[name], given[name])
        if self.kv_cache_memory_bytes is not None:
            flags["performance.memory_pool_size_mb"] = max(1, self.kv_cache_memory_bytes // _MIB)
        return {**flags, **(self.settings or {})}
