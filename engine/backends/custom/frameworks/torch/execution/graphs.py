"""CUDA graphs of the forward pass and of sampling, captured when a size first occurs.

In small steps, launching kernels one by one takes the host longer than they run; replaying a graph
is one launch. Steps are padded to the next size that has a graph.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch

_FINE = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_COARSE = 64  # spacing of larger sizes
# Sizes of steps with prefill: larger steps keep the device busy while their kernels are launched.
TOKEN_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def row_sizes(max_rows: int) -> tuple[int, ...]:
    """Batch sizes of decode-only steps; the last is `max_rows`."""
    sizes = [size for size in _FINE if size < max_rows]
    sizes.extend(range(_FINE[-1] + _COARSE, max_rows, _COARSE))
    return (*sizes, max_rows)


def at_least(sizes: tuple[int, ...], size: int) -> int | None:
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


class Capturer:
    """Captures functions as graphs on one stream. Graphs share memory, as they never overlap."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._device = device
        # PyTorch cannot capture again into a memory pool that no graph uses: one always stays.
        self._anchor = self.capture(lambda: torch.zeros(1, device=device))

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """`work` must have run once before, so that compilation and allocation are not captured."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph
