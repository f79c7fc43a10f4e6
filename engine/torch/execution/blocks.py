"""Copies blocks of the KV cache and states between the device and the host, for cache tiers.

On a GPU, the blocks are first gathered on the device, behind the steps that wrote them. The copy to
pinned memory then runs on a stream of its own, beside later steps. Blocks of the host tier are in
pinned memory, from which the GPU copies them without work for the CPU.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.runtime.model_runner import GROUPS, Bytes, Group
from engine.torch.execution.cache import CacheGroups, StateCache
from engine.torch.transfer import to_device, to_host

SLAB_BYTES = 64 * 2**20


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
        # Rows that the device may still be reading, each list with the event that ends it.
        self._lent: deque[tuple[torch.cuda.Event, list[Bytes]]] = deque()

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
    def write(self, group: Group, blocks: Sequence[int], rows: Bytes | list[Bytes]) -> None:
        """Copy rows to blocks. The rows of a list are pinned, and are read by the device itself."""
        at = to_device(np.array(blocks, np.int64), self._device)
        if self._stream is None:
            on_device = torch.from_numpy(np.asarray(rows))
        else:
            with torch.cuda.stream(self._stream):
                if isinstance(rows, list):
                    on_device = self._fetch(rows)
                else:
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

    def _fetch(self, rows: list[Bytes]) -> Tensor:
        """Copy pinned rows to the device. They are kept until the copy is done."""
        found = torch.empty((len(rows), len(rows[0])), dtype=torch.uint8, device=self._device)
        for into, row in zip(found, rows, strict=True):
            into.copy_(torch.from_numpy(row), non_blocking=True)
        done = torch.cuda.Event()
        done.record(self._stream)
        self._lent.append((done, rows))
        while self._lent[0][0].query() and len(self._lent) > 1:
            self._lent.popleft()
        return found


class PinnedRows:
    """Makes rows of pinned memory. The memory is allocated in slabs, because an allocation takes
    long. A row to which nobody refers any more is used again.
    """

    def __init__(self, pins: bool = True) -> None:
        self._pins = pins
        self._free: dict[int, list[Bytes]] = {}

    def __call__(self, num_bytes: int) -> Bytes:
        free = self._free.setdefault(num_bytes, [])
        if not free:
            count = max(1, SLAB_BYTES // max(1, num_bytes))
            size = (count, num_bytes)
            free += list(torch.empty(size, dtype=torch.uint8, pin_memory=self._pins).numpy())
        kept = free.pop()
        row = kept[:]
        weakref.finalize(row, free.append, kept).atexit = False
        return row


def _by_block(slots: Tensor, block_size: int) -> Tensor:
    """A view of memory (layers, slots, ..) as bytes (layers, blocks, bytes)."""
    layers, num_slots = slots.shape[:2]
    slot_bytes = slots[0, 0].numel() * slots.element_size() if layers else 0
    flat = slots.reshape(layers, num_slots // block_size, -1 if layers else 0)
    return flat.view(torch.uint8).view(layers, num_slots // block_size, slot_bytes * block_size)
