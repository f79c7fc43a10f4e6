"""Allocates the memory of a native model: the arena, the KV caches, the states and the sampler. It
also adds the RoPE tables.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any

import msgspec

from engine.architectures.base import ModelConfig
from engine.ir.plan import ExecutionPlan
from engine.ir.rotary import rope_frequencies
from engine.runtime.model_runner import RunnerConfig
from engine.weights.model import ModelSource

# The index of each name is its code in csrc/base/kernels.h.
KV_TYPES = ("float32", "bfloat16", "int8")
HUGE_PAGE_BYTES = 2 * 2**20


class CacheShape(msgspec.Struct, frozen=True):
    kv_type: str
    block_size: int
    sizes: Sequence[tuple[int, int]]  # for each KV cache: its number of layers and of blocks


def set_memory(model: Any, source: ModelSource, config: RunnerConfig, plan: ExecutionPlan) -> None:
    """Allocates all memory that a decoder needs besides its weights."""
    places = source.config.cache_places(config.num_window_blocks > 0)
    sizes = [
        (sum(cache == index for cache, _ in places), num_blocks)
        for index, num_blocks in enumerate((config.num_blocks, config.num_window_blocks))
        if num_blocks
    ]
    kv_type = plan.precision.kv_type
    block_bytes = kv_token_bytes(source.config, kv_type) * config.block_size
    layer_bytes = block_bytes // max(1, len(source.config.attention_layers))
    sizes = [(num_layers, on_huge_pages(count, layer_bytes)) for num_layers, count in sizes]
    shape = CacheShape(kv_type, config.block_size, sizes)
    allocate(model, source, plan, shape, config.max_seq_len)
    if source.config.state is not None:
        count = config.max_slots + 1 + config.num_checkpoints
        model.set_states(source.config.state_floats, count)
    model.set_sampler(source.config.vocab_size, config.max_slots, config.max_seq_len)


def on_huge_pages(num_blocks: int, block_bytes: int) -> int:
    """The number of blocks to allocate for each layer of a large KV cache, so that every layer
    begins at a huge page. Otherwise the first block in use would commit a huge page more in each
    layer. The added blocks are never used, so they take no memory.
    """
    multiple = HUGE_PAGE_BYTES // gcd(HUGE_PAGE_BYTES, block_bytes)
    return num_blocks if num_blocks < multiple else -(-num_blocks // multiple) * multiple


def kv_token_bytes(config: ModelConfig, stored_as: str) -> int:
    """Bytes of one token in the KV cache. Heads are padded to multiples of 32 values."""
    dim = -(-config.head_dim // 32) * 32
    head_bytes = {"float32": 4 * dim, "bfloat16": 2 * dim, "int8": dim + 4}[stored_as]
    layers = len(config.attention_layers)
    return layers * config.kv_parts * config.num_kv_heads * head_bytes


def allocate(
    model: Any, source: ModelSource, plan: ExecutionPlan, cache: CacheShape, max_seq_len: int
) -> None:
    """Allocates the arena and the KV caches, and adds the RoPE tables."""
    model_config = source.config
    kinds = {buffer.place: buffer.per for buffer in plan.buffers}
    model.set_arena(
        [(width, kinds[place] == "logit") for place, width in enumerate(plan.places)],
        [(buffer.place, buffer.width) for buffer in plan.buffers],
        plan.capacity.tokens,
        plan.capacity.logits,
        plan.output,
    )
    for index, (num_layers, num_blocks) in enumerate(cache.sizes):
        model.set_cache(
            index,
            KV_TYPES.index(cache.kv_type),
            num_layers,
            model_config.num_kv_heads,
            model_config.head_dim,
            cache.block_size,
            num_blocks,
            0 if model_config.latent is None else model_config.latent.kv_rank,
        )
    model.set_max_positions(max_seq_len)
    factors = source.weights.get("rope.factors")
    for rope in model_config.ropes:
        frequencies, scale = rope_frequencies(
            rope, max_seq_len, None if factors is None else factors.numpy()
        )
        model.add_rope(list(map(float, frequencies)), scale)
