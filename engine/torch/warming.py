"""Prepares a runner for all steps that the scheduler can ask for, before the first request.

A first pass compiles kernels in parallel. It needs no size of steps between powers of two: tiles do
not differ there. A second pass runs a step of each size and captures its CUDA graphs. Graphs with
shared prefixes and of unusual sampling are captured when they are first needed, which takes a few
milliseconds.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Protocol

import torch

from engine.runtime.dummy_batch import idle_inputs
from engine.runtime.model_runner import BatchInputs, RunnerSpec
from engine.torch.compiling import compiling_ahead
from engine.torch.execution.device_sampler import Kind
from engine.torch.execution.step_sizes import TOKEN_SIZES, Size

ALL_KINDS = tuple(Kind(*flags) for flags in product((False, True), repeat=3))
USUAL_KINDS = (Kind(False, False, False), Kind(False, False, True))
ROW_TOKENS = 512  # tokens of a row in a step without a graph

log = logging.getLogger(__name__)


class GraphRunner(Protocol):
    @property
    def spec(self) -> RunnerSpec: ...

    def sizes(self) -> Iterator[Size]: ...

    def prepare(self, inputs: BatchInputs, size: Size | None, kinds: Iterable[Kind] = ()) -> None:
        """Runs a step of this size, and sampling of these kinds. None: a step without a graph."""
        ...

    def capture(self, size: Size, kinds: Iterable[Kind]) -> None:
        """Captures the graphs of steps of this size. `prepare` has run such a step before."""
        ...


def warm(runner: GraphRunner, device: torch.device, max_batch_tokens: int) -> None:
    """Compiles all kernels, and captures the graphs of usual steps."""
    began, one = time.monotonic(), idle_inputs(runner.spec, (1,))
    sizes = list(runner.sizes())
    different = [size for size in sizes if size.tokens & (size.tokens - 1) == 0 or size is sizes[0]]
    large = [
        idle_inputs(runner.spec, counts) for counts in _large_steps(runner.spec, max_batch_tokens)
    ]
    with compiling_ahead(device):
        for size in different:
            runner.prepare(one, size, ALL_KINDS if size in (sizes[0], sizes[-1]) else ())
        for inputs in large:
            runner.prepare(inputs, None)
    compiled = time.monotonic()
    for size in (size for size in sizes if not size.shares):
        runner.prepare(one, size, USUAL_KINDS)
        runner.capture(size, USUAL_KINDS)
    for inputs in large:
        runner.prepare(inputs, None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    log.info(
        "warm: %d sizes of steps, kernels %.1f s, graphs %.1f s",
        len(sizes),
        compiled - began,
        time.monotonic() - compiled,
    )


def _large_steps(spec: RunnerSpec, max_batch_tokens: int) -> Iterator[list[int]]:
    """The rows of two steps without a graph, as numbers of tokens. Steps with long rows in float8
    have none, even if they are small enough.
    """
    row = min(ROW_TOKENS, spec.max_seq_len)
    for tokens in sorted({min(TOKEN_SIZES[-1] + row, max_batch_tokens), max_batch_tokens}):
        yield [row] * max(1, tokens // row)
