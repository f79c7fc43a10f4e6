"""The paged KV cache of all layers. It is one tensor, which is addressed by block or by slot.

A slot is block * block_size + offset. The key and the value of a slot are next to each other, so
one gather of blocks reads both. Block 0 belongs to no sequence; padding tokens write to it.
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
        self._blocks = _zeros(
            (
                *(shape.num_layers, num_blocks, block_size),
                *(shape.parts, shape.num_kv_heads, shape.head_dim),
            ),
            dtype,
            device,
        )
        # Each slot has (P, K, H) values, where P is the number of parts.
        self.slots = self._blocks.flatten(1, 2)  # (layers, num_blocks * block_size, P, K, H)
        self._null_slot = NULL_BLOCK * block_size
        # Views of the cache, one per layer. They are made once, because making a view takes time.
        self._layer_slots = self.slots.unbind(0)
        self.layers = self._blocks.unbind(0)  # (num_blocks, block_size, P, K, H) each

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes keys and values (T, K, H) to the slots (T,) of one layer. If the cache has keys
        only, v is ignored.
        """
        cached = self._layer_slots[layer]
        token = k[:, None] if cached.shape[1] == 1 else torch.stack((k, v), dim=1)
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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates a tensor of zeros. Uninitialised memory could contain NaN. Attention multiplies the
    values of masked positions by 0, but 0 * NaN is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # np.zeros gets zero-filled pages from the system, which use no memory until they are written.
    # torch.zeros would write every page at once.
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
