"""Copies blocks of the KV cache and states between the device and the host, for cache tiers.

On a GPU, the blocks are first gathered on the device, behind the steps that wrote them. The copy to
pinned memory then runs on a stream of its own, beside later steps.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.execution.cache import CacheGroups, StateCache
from engine.backends.custom.frameworks.torch.execution.transfer import to_device, to_host
from engine.backends.custom.runtime.model_runner import GROUPS, Bytes, Group


class BlockCopier:
    def __init__(
        self, caches: CacheGroups, states: StateCache, block_size: int, device: torch.device
    ) -> None:
        self._device = device
        # The memory of each group as tensors (layers, blocks, bytes).
        self._memory: dict[Group, list[Tensor]] = {
            group: [_by_block(cache.slots, block_size)]
            for group, cache in zip(GROUPS, caches.caches, strict=False)
        }
        kept = [each for layer in states.layers for each in (layer.conv, layer.matrix)]
        self._memory["state"] = [_by_block(each[None], 1) for each in kept if each is not None]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def bytes_per_block(self, group: Group) -> int:
        return sum(each.shape[0] * each.shape[2] for each in self._memory.get(group, ()))

    @torch.inference_mode()
    def read(self, group: Group, blocks: Sequence[int]) -> Callable[[], Bytes]:
        at = to_device(np.array(blocks, np.int64), self._device)
        parts = [
            each.index_select(1, at).transpose(0, 1).reshape(len(blocks), -1)
            for each in self._memory[group]
        ]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self._stream is None:
            return lambda: rows.numpy()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            on_host = to_host(rows)
            done = torch.cuda.Event()
            done.record(self._stream)
        rows.record_stream(self._stream)

        def wait() -> Bytes:
            done.synchronize()
            return on_host.numpy()

        return wait

    @torch.inference_mode()
    def write(self, group: Group, blocks: Sequence[int], rows: Bytes) -> None:
        at = to_device(np.array(blocks, np.int64), self._device)
        if self._stream is None:
            on_device = torch.from_numpy(rows)
        else:
            with torch.cuda.stream(self._stream):
                on_device = to_device(rows, self._device)
            here = torch.cuda.current_stream(self._device)
            here.wait_stream(self._stream)
            on_device.record_stream(here)
        start = 0
        for each in self._memory[group]:
            layers, _, size = each.shape
            part = on_device[:, start : start + layers * size]
            each.index_copy_(1, at, part.reshape(len(blocks), layers, size).transpose(0, 1))
            start += layers * size


def _by_block(slots: Tensor, block_size: int) -> Tensor:
    """A view of memory (layers, slots, ..) as bytes (layers, blocks, bytes)."""
    layers, num_slots = slots.shape[:2]
    slot_bytes = slots[0, 0].numel() * slots.element_size() if layers else 0
    flat = slots.reshape(layers, num_slots // block_size, -1 if layers else 0)
    return flat.view(torch.uint8).view(layers, num_slots // block_size, slot_bytes * block_size)
