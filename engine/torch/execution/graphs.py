"""CUDA graphs of the forward pass and of sampling. A graph is captured when a step of its size
first occurs.

In small steps, the host needs more time to launch the kernels one by one than the kernels need to
run. Replaying a graph is a single launch.
"""

from collections.abc import Callable

import torch


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
