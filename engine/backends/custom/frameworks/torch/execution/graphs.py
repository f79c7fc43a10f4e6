"""CUDA graphs of the forward pass and of sampling. A graph is captured when a step of its size
first occurs.

In small steps, the host needs more time to launch the kernels one by one than the kernels need to
run. Replaying a graph is a single launch. Steps are padded to the next size that has a graph.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator

import torch

from engine.backends.custom.frameworks.torch.execution.staging import Size

_FINE = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_COARSE = 64  # larger sizes than those in _FINE are this far apart
# The sizes of steps with prefill, in tokens. Larger steps need no graph, because their kernels run
# longer than it takes to launch them, which may be 45 ms on a slow CPU.
TOKEN_SIZES = (
    *(16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    *(1280, 1536, 2048, 2560, 3072, 3584, 4096),
)


def decode_size(rows: int, shares: bool) -> Size:
    return Size(rows, rows, rows, True, shares)


def mixed_size(tokens: int, max_rows: int) -> Size:
    most = min(tokens, max_rows)
    return Size(tokens, most, most, False, False)


def row_sizes(max_rows: int) -> tuple[int, ...]:
    """The sizes of decode-only steps that have graphs, in rows. The largest is `max_rows`."""
    sizes = [size for size in _FINE if size < max_rows]
    sizes.extend(range(_FINE[-1] + _COARSE, max_rows, _COARSE))
    return (*sizes, max_rows)


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """The sizes of steps with prefill that have graphs, if no step has more tokens than this."""
    most = at_least(TOKEN_SIZES, max_tokens)
    return TOKEN_SIZES if most is None else TOKEN_SIZES[: TOKEN_SIZES.index(most) + 1]


def at_least(sizes: tuple[int, ...], size: int) -> int | None:
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


def all_sizes(rows: tuple[int, ...], tokens: tuple[int, ...], *, can_share: bool) -> Iterator[Size]:
    """The sizes of all steps that have graphs, the largest first. `rows` are the sizes of
    decode-only steps, and `tokens` those of steps with prefill. `can_share` says whether decode may
    attend to shared prefixes.
    """
    for count in reversed(rows):
        yield decode_size(count, False)
        if can_share:
            yield decode_size(count, True)
    for count in reversed(tokens):
        yield mixed_size(count, rows[-1])


class Capturer:
    """Captures functions as CUDA graphs. All graphs share one memory pool, because they never run
    at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._device = device
        # PyTorch cannot capture into a memory pool that no graph uses any more. So this graph is
        # always kept.
        self._anchor = self.capture(lambda: torch.zeros(1, device=device))

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Captures the kernels that `work` launches. `work` must have run once before, so that
        kernels are already compiled and one-time allocations are done.
        """
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
