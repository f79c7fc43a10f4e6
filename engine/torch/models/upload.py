"""Copies stored weights to a GPU as they are, without a conversion on the CPU.

Several threads copy pieces of a mapped file to page-locked buffers, from where the GPU fetches them
itself. A single thread would read the file at a fraction of the speed of memory.
"""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.architectures.tensors import Transform
from engine.weights.random import RandomWeight
from engine.weights.weight import Weight

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
THREADS, PIECE_BYTES = 8, 16 * 2**20


def can_upload(weight: object, device: torch.device) -> TypeGuard[Weight]:
    """Whether the stored bytes of a weight are its values in the engine's layout."""
    return (
        device.type == "cuda"
        and isinstance(weight, Weight)
        and not isinstance(weight, RandomWeight)
        and not weight.spec.of_experts
        and weight.transform == Transform()
        and weight.tensor.dtype in STORED
    )


class Uploader:
    """Copies weights to one GPU. `close` frees its threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(THREADS, "upload")
        self._free: SimpleQueue[tuple[Tensor, torch.cuda.Event]] = SimpleQueue()
        for _ in range(THREADS):
            self._free.put((_page_locked(PIECE_BYTES), torch.cuda.Event()))

    def upload(self, weight: Weight) -> Tensor:
        """The weight on the GPU, in its stored type. Later work of the current stream sees it."""
        raw, stream = weight.rows().raw, torch.cuda.current_stream(self._device)
        values = torch.empty(len(raw), dtype=torch.uint8, device=self._device)
        pieces = [
            self._pool.submit(self._copy, raw[start : start + PIECE_BYTES], values, start, stream)
            for start in range(0, len(raw), PIECE_BYTES)
        ]
        for piece in pieces:
            piece.result()
        return values.view(STORED[weight.tensor.dtype]).view(weight.spec.shape)

    def close(self) -> None:
        self._pool.shutdown()

    def _copy(
        self, piece: NDArray[np.uint8], values: Tensor, start: int, stream: torch.cuda.Stream
    ) -> None:
        buffer, fetched = self._free.get()
        fetched.synchronize()
        np.copyto(buffer.numpy()[: len(piece)], piece)
        with torch.cuda.stream(stream):
            values[start : start + len(piece)].copy_(buffer[: len(piece)], non_blocking=True)
            fetched.record()
        self._free.put((buffer, fetched))


def _page_locked(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
