"""Refuses `--numerics invariant` for devices and models without kernels for it."""

import torch

from engine.architectures.base import ModelConfig
from engine.core.errors import ConfigError
from engine.runtime.model_runner import RunnerConfig
from engine.torch.device import is_amd
from engine.torch.kernels.invariant.attention import FLOAT32_TILE
from engine.torch.models.quantized_loading import keeps_quantized
from engine.weights.model import ModelSource


def check_invariant(source: ModelSource, config: RunnerConfig, device: torch.device) -> None:
    """Raises `ConfigError`, which names the reason, if the results of a request could depend on the
    other requests of its steps.
    """
    if device.type != "cuda":
        raise ConfigError(
            "numerics invariant needs a GPU with --backend torch; on a CPU, use --backend native"
        )
    if is_amd():
        raise ConfigError(
            "numerics invariant needs an NVIDIA GPU: on an AMD GPU, the order of sums may depend "
            "on the batch; leave it out"
        )
    if config.attention != "auto":
        raise ConfigError(
            "numerics invariant has an attention kernel of its own; leave out attention "
            f"'{config.attention}'"
        )
    if config.quantization == "int8" or keeps_quantized(source.weights, device):
        raise ConfigError(
            "numerics invariant does not cover weights of 4 or 8 bits with a scale per group; use "
            "a checkpoint in 16 or 32 bits (also with --quantization fp8), or --backend native"
        )
    if (missing := _without_kernel(source.config)) is not None:
        raise ConfigError(
            f"numerics invariant does not cover {missing} (family '{source.config.family}'); "
            "leave it out"
        )


def _without_kernel(config: ModelConfig) -> str | None:
    """What the model has that no kernel computes in a fixed order. None: nothing."""
    experts = config.experts
    if config.latent is not None:
        return "latent attention"
    if config.state is not None:
        return "layers that keep a state"
    if config.vision is not None:
        return "models that read images"
    if experts is not None and (experts.groups > 1 or experts.correction):
        return "experts that are chosen by group or with a correction"
    plain = any(config.layer(index).rope is None for index in config.attention_layers)
    if config.qk_norm == "head" and plain:
        return "norms per head in layers without RoPE"
    if config.num_heads // config.num_kv_heads > FLOAT32_TILE[0]:
        return f"more than {FLOAT32_TILE[0]} query heads per KV head"
    return None
