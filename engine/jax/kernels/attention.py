"""The attention backends of JAX. A backend computes paged attention for a batch, which may mix
prefill and decode.

Backends differ only in speed. Each backend is tested against `causal_attention`, which attends over
one sequence without a cache.
"""

from typing import Protocol

import jax.numpy as jnp
from jax import Array

from engine.architectures.base import ModelConfig
from engine.core.errors import ConfigError
from engine.jax.kernels.attention_pallas import pallas_attention
from engine.jax.kernels.attention_xla import xla_attention
from engine.jax.kernels.work import AttentionShape, PerHead, Work


class AttentionBackend(Protocol):
    def __call__(
        self, q: Array, cache: Array, work: Work, shape: AttentionShape, per_head: PerHead
    ) -> Array:
        """Attention of one layer: queries q (T, N, H) -> outputs (T, N, U). The outputs of padding
        tokens are undefined. `cache` (slots, 2, K, H) has the key, then the value of each slot. It
        already contains the keys and values of this step. U is H, except in latent attention: there
        the cache (slots, 1, 1, H) has keys only, and the first U values of a key are its value.
        """
        ...


MAX_OFFSET = 2**31 - 1  # the Pallas kernel uses 32-bit offsets within the cache of a layer
ATTENTION: dict[str, AttentionBackend] = {"xla": xla_attention, "pallas": pallas_attention}


def attention_backend(
    name: str, config: ModelConfig, platform: str, num_slots: int
) -> AttentionBackend:
    """The attention backend with this name. "auto" chooses Pallas on a GPU if Pallas supports the
    head size, else XLA.
    """
    if name == "auto":
        can_tile = config.head_dim >= 16 and config.head_dim & (config.head_dim - 1) == 0
        can_tile = can_tile and config.latent is None
        name = "pallas" if platform == "gpu" and can_tile else "xla"
    if name not in ATTENTION:
        raise ConfigError(
            f"attention backend '{name}' is unknown; use auto or one of {', '.join(ATTENTION)}"
        )
    if name == "pallas" and config.latent is not None:
        raise ConfigError("attention backend 'pallas' has no latent attention; use xla")
    most = MAX_OFFSET // (2 * config.num_kv_heads * config.head_dim)
    if name == "pallas" and num_slots > most:
        raise ConfigError(
            f"a KV cache of {num_slots:,} tokens is more than the {most:,} that the kernel can "
            "address; give it less with performance.memory_pool_size_mb"
        )
    return ATTENTION[name]


def write_and_attend(
    attention: AttentionBackend,
    shape: AttentionShape,
    per_head: PerHead,
    q: Array,
    k: Array,
    v: Array,
    cache: Array,
    write_slots: Array,
    work: Work,
) -> tuple[Array, Array]:
    """Writes the keys and values of one layer to the cache, then computes attention. If the model
    is sharded over several devices, each device computes only its own heads.
    """
    token = k[:, None] if cache.shape[1] == 1 else jnp.stack((k, v), axis=1)
    cache = cache.at[write_slots].set(token, mode="promise_in_bounds")
    return attention(q, cache, work, shape, per_head), cache
