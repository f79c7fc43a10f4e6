"""The paged KV tensors: one allocation, addressed by block or by slot.

A slot is block * block_size + offset. A slot's key and value are adjacent, so one gather of blocks
fetches both. Block 0 belongs to no sequence: padding is written there.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.execution.transfer import to_device
from engine.backends.custom.runtime.model_runner import NULL_BLOCK, BatchInputs


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one token's keys and values, equal in all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class PagedCache:
    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._blocks = _zeros(
            (shape.num_layers, num_blocks, block_size, 2, shape.num_kv_heads, shape.head_dim),
            dtype,
            device,
        )
        self.slots = self._blocks.flatten(1, 2)  # (layers, num_blocks * block_size, 2, K, H)
        self._null_slot = NULL_BLOCK * block_size
        # Per-layer views, made once rather than in every step.
        self._layer_slots = self.slots.unbind(0)
        self.layers = self._blocks.unbind(0)  # (num_blocks, block_size, 2, K, H) each

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes k, v (T, K, H) to slots (T,)."""
        self._layer_slots[layer].index_copy_(0, slots, torch.stack((k, v), dim=1))

    def guard(self, inputs: BatchInputs, x: Tensor, write_slots: Tensor) -> Tensor:
        """Which rows of a step are finite, (S,); erases what the other rows wrote to the cache.

        x (T, D) is the residual stream after the last block. It carries any NaN or infinity of a
        token to its end, so its sum reveals them.
        """
        bad = ~torch.isfinite(x.sum(dim=-1, dtype=torch.float32))  # (T,)
        self.erase(write_slots, bad)
        if len(inputs.slots) == len(inputs.token_ids):
            return ~bad
        row_of = np.repeat(np.arange(len(inputs.slots)), np.diff(inputs.query_start))
        num_bad = torch.zeros(len(inputs.slots), device=x.device)
        return num_bad.index_add_(0, to_device(row_of, x.device), bad.float()) == 0

    def erase(self, slots: Tensor, where: Tensor) -> None:
        """Zeroes the slots (T,) where the flag (T,) is set, in every layer.

        NaN in a block would reach its next owner through masked positions. The flag stays on the
        device: slots that keep their contents are replaced by a slot of the null block.
        """
        self.slots.index_fill_(1, torch.where(where, slots, self._null_slot), 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: positions past a row's end are read under a mask, and 0 * NaN is NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy gets zero pages from the system, which use memory only once written; PyTorch would
    # write them all.
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
