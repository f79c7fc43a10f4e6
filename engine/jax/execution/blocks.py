"""Copies blocks of the KV cache between the device and the host, for cache tiers."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.architectures.base import ModelConfig
from engine.runtime.model_runner import I32, Bytes, RunnerConfig


def block_slots(blocks: Sequence[int], block_size: int) -> I32:
    """The slots of blocks. The array is padded to a power of two with slots that no cache has,
    because a version of the functions below is compiled for each length.
    """
    num_padded = 1 << (len(blocks) - 1).bit_length()
    padded = np.full(num_padded, np.iinfo(np.int32).max // block_size, np.int64)
    padded[: len(blocks)] = blocks
    slots = padded[:, None] * block_size + np.arange(block_size)
    return slots.reshape(-1).astype(np.int32)


@jax.jit
def gather_slots(caches: list[Array], slots: Array) -> list[Array]:
    return [cache.at[slots].get(mode="clip") for cache in caches]


@partial(jax.jit, donate_argnums=0)
def scatter_slots(caches: list[Array], slots: Array, values: list[Array]) -> list[Array]:
    return [
        cache.at[slots].set(value, mode="drop") for cache, value in zip(caches, values, strict=True)
    ]


def rows_of(found: list[Array], num_blocks: int, block_size: int) -> Bytes:
    """The bytes of gathered blocks, one row each. Waits for the device."""
    parts = [
        np.asarray(each)[: num_blocks * block_size].reshape(num_blocks, -1).view(np.uint8)
        for each in found
    ]
    return np.concatenate(parts, axis=1)


def values_of(
    rows: Bytes, caches: list[Array], block_size: int, num_slots: int
) -> list[NDArray[np.generic]]:
    """The reverse of `rows_of`: the values of `num_slots` slots for each cache."""
    values, start = [], 0
    for cache in caches:
        shape, size = (
            cache.shape[1:],
            block_size * cache.dtype.itemsize * int(np.prod(cache.shape[1:])),
        )
        part = np.ascontiguousarray(rows[:, start : start + size]).view(cache.dtype)
        value = np.zeros((num_slots, *shape), cache.dtype)
        value[: len(rows) * block_size] = part.reshape(-1, *shape)
        values.append(value)
        start += size
    return values


def cache_shapes(model: ModelConfig, config: RunnerConfig) -> list[tuple[int, int, int, int]]:
    """The shape of each layer's KV cache. Layers with a sliding window may have fewer blocks."""
    num_blocks = config.num_blocks, config.num_window_blocks
    return [
        (num_blocks[cache] * config.block_size, model.kv_parts, model.num_kv_heads, model.head_dim)
        for cache, _ in model.cache_places(config.num_window_blocks > 0)
    ]
