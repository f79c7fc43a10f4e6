"""Lets the torch, JAX and tinygrad frameworks reject options that they do not support."""

from collections.abc import Iterable

from engine.architectures.base import ModelConfig
from engine.core.errors import ConfigError
from engine.runtime.model_runner import RunnerConfig


def check_dtype(dtype: str, known: Iterable[str]) -> None:
    names = list(known)
    if dtype not in names:
        raise ConfigError(f"dtype '{dtype}' is unknown; use one of {', '.join(names)}")


def check_numerics(framework: str, numerics: str) -> None:
    """Refuses "invariant". "fast" is accepted: it allows what tensor libraries do anyway."""
    if numerics == "invariant":
        raise ConfigError(
            f"numerics invariant is not available here: the kernels of the {framework} backend "
            "sum in an order that depends on the batch; use --backend native, or leave numerics out"
        )


def check_config(framework: str, library: str, model: ModelConfig, config: RunnerConfig) -> None:
    """Raises `ConfigError` for options that the framework does not support, and for a `max_seq_len`
    beyond the model's learned positions. `library` is the tensor library's name, for messages.
    """
    if config.kv_dtype == "fp8":
        raise ConfigError("kv_dtype fp8 needs --backend torch on a GPU")
    if config.kv_dtype not in ("auto", config.dtype):
        raise ConfigError(
            f"the {framework} backend keeps keys and values as {config.dtype}, the type it "
            f"computes in; kv_dtype {config.kv_dtype} needs --backend native"
        )
    check_numerics(framework, config.numerics)
    if config.affinity not in ("auto", "off"):
        raise ConfigError(
            f"performance.affinity binds the native backend's threads, not {library}'s"
        )
    if model.learned_positions and config.max_seq_len > model.max_position:
        raise ConfigError(
            f"max_seq_len {config.max_seq_len} is beyond the model's {model.max_position} "
            "learned positions; lower it"
        )


def check_plain(
    framework: str, library: str, dtypes: Iterable[str], model: ModelConfig, config: RunnerConfig
) -> None:
    """Does the checks of `check_config`, and also rejects requantization of weights and dtypes
    other than `dtypes`.
    """
    check_dtype(config.dtype, dtypes)
    check_config(framework, library, model, config)
    if config.quantization != "auto":
        raise ConfigError(f"quantization {config.quantization} needs --backend torch on a GPU")
