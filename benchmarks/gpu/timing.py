"""Times a call on the GPU, inside a CUDA graph and with inputs that are not in the L2 cache.

A graph holds one call on each of several copies of the inputs. Together they are larger than the
card's L2 cache, so no call finds its weights there.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.torch.kernels.base import copied, tensors_in

COPIES_BYTES = 256 * 1024**2
MAX_COPIES = 48
ROUNDS = 5


def copies_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[tuple, dict]]:
    """Several copies of the call's arguments."""
    size = sum(tensor.nbytes for tensor in tensors_in([*args, *kwargs.values()]))
    count = min(max(COPIES_BYTES // max(size, 1), 2), MAX_COPIES)

    return [
        (tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()})
        for _ in range(count)
    ]


def microseconds(call: Callable[..., Any], inputs: list[tuple[tuple, dict]]) -> float:
    """Time of one call in the fastest round. Without a GPU, the time of one plain call."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call(*inputs[0][0], **inputs[0][1])
        return (time.perf_counter() - start) * 1e6

    def run() -> None:
        for args, kwargs in inputs:
            call(*args, **kwargs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    best = float("inf")
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / len(inputs))
    return best
