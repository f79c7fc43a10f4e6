"""The paged KV cache of all layers. It is one tensor, which is addressed by block or by slot.

A slot is block * block_size + offset. The key and the value of a slot are next to each other, so
one gather of blocks reads both. Block 0 belongs to no sequence; padding tokens write to it.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.architectures.base import ModelConfig
from engine.runtime.model_runner import (
    I32,
    I64,
    NULL_BLOCK,
    BatchInputs,
    RunnerConfig,
)
from engine.torch.kernels.fp8 import FP8, cache_slot_bytes, write_cache
from engine.torch.layers.recurrent import LayerState
from engine.torch.transfer import to_device


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one token's keys and values, which is the same in all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    parts: int = 2  # key and value; 1: the key alone, of which the value is a part


class PagedCache:
    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        sizes = (shape.num_layers, num_blocks, block_size)
        vectors = (shape.parts, shape.num_kv_heads, shape.head_dim)
        self._in_fp8 = dtype == FP8
        if self._in_fp8:
            slot = cache_slot_bytes(shape.parts * shape.num_kv_heads, shape.head_dim)
            memory = _zeros((*sizes, slot), torch.uint8, device)
            inner = (shape.num_kv_heads * shape.head_dim, shape.head_dim, 1)
            blocks = memory.view(FP8).as_strided((*sizes, *vectors), (*memory.stride()[:3], *inner))
        else:
            memory = blocks = _zeros((*sizes, *vectors), dtype, device)
        # Each slot has (P, K, H) values, where P is the number of parts. A float8 slot has its
        # scales after them, and is shown as bytes here.
        self.slots = memory.flatten(1, 2)  # (layers, num_blocks * block_size, ..)
        self._null_slot = NULL_BLOCK * block_size
        # Views of the cache, one per layer. They are made once, because making a view takes time.
        self._layer_slots = blocks.flatten(1, 2).unbind(0)
        self.layers = blocks.unbind(0)  # (num_blocks, block_size, P, K, H) each

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes keys and values (T, K, H) to the slots (T,) of one layer. If the cache has keys
        only, v is ignored.
        """
        cached = self._layer_slots[layer]
        token = k[:, None] if cached.shape[1] == 1 else torch.stack((k, v), dim=1)
        if self._in_fp8:
            write_cache(cached, slots, token)
        else:
            cached.index_copy_(0, slots, token)

    def guard(self, inputs: BatchInputs, x: Tensor, write_slots: Tensor) -> Tensor:
        """Returns whether each row of a step is free of NaN and infinity, (S,). Also erases the
        keys and values that tokens with NaN or infinity wrote to the cache.

        x (T, D) is the residual stream after the last block. NaN and infinity of earlier layers are
        still in the stream, so the sum of its values reveals them.
        """
        bad = ~torch.isfinite(x.sum(dim=-1, dtype=torch.float32))  # (T,)
        self.erase(write_slots, bad)
        if len(inputs.slots) == len(inputs.token_ids):
            return ~bad
        row_of = np.repeat(np.arange(len(inputs.slots)), np.diff(inputs.query_start))
        num_bad = torch.zeros(len(inputs.slots), device=x.device)
        return num_bad.index_add_(0, to_device(row_of, x.device), bad.float()) == 0

    def erase(self, slots: Tensor, where: Tensor) -> None:
        """Fills cache slots with zeros in all layers: for each token, slots[t] if where[t] is true.

        Otherwise NaN in a block would reach the next sequence that uses the block, because
        attention multiplies masked values by 0, and 0 * NaN is NaN. The host does not read `where`,
        so that it need not wait. If where[t] is false, a slot of the null block is zeroed instead.
        """
        self.slots.index_fill_(1, torch.where(where, slots, self._null_slot), 0)


class CacheGroups:
    """The KV caches of a model. Cache 0 is that of layers without a sliding window. If layers with
    windows have blocks of their own, they use cache 1.

    Slots are given as a tuple of tensors (T,), with the slots of each token in each cache.
    """

    def __init__(
        self, model: ModelConfig, config: RunnerConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.in_fp8 = dtype == FP8
        self._places = model.cache_places(config.num_window_blocks > 0)
        self.caches = tuple(
            PagedCache(
                KVShape(
                    sum(cache == index for cache, _ in self._places),
                    model.num_kv_heads,
                    model.head_dim,
                    model.kv_parts,
                ),
                num_blocks,
                config.block_size,
                device,
                dtype,
            )
            for index, num_blocks in enumerate((config.num_blocks, config.num_window_blocks))
            if num_blocks
        )
        # The cache of each layer that has attention, by the layer's number.
        self.layers = {
            number: self.caches[cache].layers[index]
            for number, (cache, index) in enumerate(self._places)
            if cache >= 0
        }

    def slots_of(self, layer: int, slots: tuple[Tensor, ...]) -> Tensor:
        """The slots in the cache that the layer uses."""
        return slots[self._places[layer][0]]

    def write(self, layer: int, slots: tuple[Tensor, ...], k: Tensor, v: Tensor) -> None:
        cache, index = self._places[layer]
        self.caches[cache].write(index, slots[cache], k, v)

    def guard(self, inputs: BatchInputs, x: Tensor, slots: tuple[Tensor, ...]) -> Tensor:
        """See `PagedCache.guard`."""
        finite = [
            cache.guard(inputs, x, own) for cache, own in zip(self.caches, slots, strict=True)
        ]
        return finite[0]


def slots_by_cache(inputs: BatchInputs) -> list[I64]:
    """The write slots of a step in each cache of `CacheGroups`."""
    windowed = inputs.window_slots
    return [inputs.write_slots] if windowed is None else [inputs.write_slots, windowed]


class StateCache:
    """The states of all sequences, for layers that keep one. The slot after those of sequences is
    that of padding rows. Copies for the prefix cache follow it.
    """

    def __init__(
        self, config: ModelConfig, num_states: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.layers: list[LayerState] = []
        for index in config.state_layers:
            state, mixer = config.state, config.layer(index).mixer
            assert state is not None, config
            window = (num_states, state.conv_size - 1, state.sizes(mixer, config.hidden_size)[1])
            conv = _zeros(window, dtype, device)
            matrix = None
            if mixer != "conv":
                shape = (num_states, state.heads, state.state_size, state.head_dim)
                matrix = _zeros(shape, torch.float32, device)
            self.layers.append(LayerState(conv, matrix))

    def copy(self, sources: I32, targets: I32) -> None:
        """Copies states. Both arrays have indices of states."""
        if not len(sources):
            return
        device = self.layers[0].conv.device if self.layers[0].conv is not None else None
        assert device is not None
        at, to = (to_device(each.astype(np.int64), device) for each in (sources, targets))
        for layer in self.layers:
            for states in (layer.conv, layer.matrix):
                if states is not None:
                    states.index_copy_(0, to, states.index_select(0, at))

    def load(self, inputs: BatchInputs) -> None:
        """Copies states of the prefix cache to the slots of rows that continue them."""
        if inputs.state_load is not None:
            rows = np.flatnonzero(inputs.state_load >= 0)
            self.copy(inputs.state_load[rows], inputs.slots[rows])

    def save(self, inputs: BatchInputs) -> None:
        """Copies states of slots to the prefix cache."""
        if inputs.state_save is not None:
            rows = np.flatnonzero(inputs.state_save >= 0)
            self.copy(inputs.slots[rows], inputs.state_save[rows])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates a tensor of zeros. Uninitialised memory could contain NaN. Attention multiplies the
    values of masked positions by 0, but 0 * NaN is NaN.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    # np.zeros gets zero-filled pages from the system, which use no memory until they are written.
    # torch.zeros would write every page at once.
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
