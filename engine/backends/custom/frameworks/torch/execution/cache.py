"""The paged key-value tensors: one allocation, addressed by block or by slot.

A slot is block * block_size + offset. Key and value of a slot lie side by side, so one gather of
blocks brings both. Block 0 is nobody's: padding is written there.
"""

import math

import numpy as np
import torch
from torch import Tensor

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.runtime.seam import NULL_BLOCK


class PagedCache:
    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._blocks = _zeros(
            (config.num_layers, num_blocks, block_size, 2, config.num_kv_heads, config.head_dim),
            dtype,
            device,
        )
        self.slots = self._blocks.flatten(1, 2)  # (layers, num_blocks * block_size, 2, K, H)
        self._null_slot = NULL_BLOCK * block_size
        # Per layer, indexed once here rather than in every step.
        self._layer_slots = self.slots.unbind(0)
        self.layers = self._blocks.unbind(0)  # (num_blocks, block_size, 2, K, H) each

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v (T, K, H) to slots (T,)"""
        self._layer_slots[layer].index_copy_(0, slots, torch.stack((k, v), dim=1))

    def erase(self, slots: Tensor, where: Tensor) -> None:
        """Zero the slots (T,) where the flag (T,) is set, in every layer.

        A block that held NaN would poison its next owner through masked positions. The flag stays
        on the device: slots that keep their contents are replaced by one of the null block.
        """
        self.slots.index_fill_(1, torch.where(where, slots, self._null_slot), 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: positions past a row's end are read under a mask, and 0 * NaN is NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy gets zero pages from the system, which take memory only once they are written; PyTorch
    # would write them all.
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
