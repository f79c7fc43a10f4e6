"""The sizes to which steps are padded. Each size has buffers and CUDA graphs of its own.

Decode-only steps and small steps with prefill are padded to a size that has a graph. Larger steps
have none.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from engine.runtime.model_runner import BatchInputs, RunnerConfig
from engine.torch.kernels import lora
from engine.torch.kernels.attention_triton import TritonAttention

if TYPE_CHECKING:
    from engine.torch.execution.taps import Shapes

_FINE = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_COARSE = 64  # larger sizes than those in _FINE are this far apart
# The sizes of steps with prefill, in tokens. Larger steps need no graph, because their kernels run
# longer than it takes to launch them, which may be 45 ms on a slow CPU.
TOKEN_SIZES = (
    *(16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    *(1280, 1536, 2048, 2560, 3072, 3584, 4096),
)
TOKEN_STEP = 128  # in invariant numerics, large steps have multiples of this many tokens
LONG_CHUNK = 1024  # tokens of a step, and keys of a row


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a step, with padding. Each size has its own buffers and CUDA graphs."""

    tokens: int
    rows: int
    samples: int
    only_decodes: bool
    shares: bool
    taps: "Shapes" = ()  # a step with taps has a graph of its own
    num_adapters: int = 0  # the most LoRA adapters that rows may have; 0: the step has no tiles


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


class StepSizes:
    """The sizes of a runner's steps."""

    def __init__(
        self, config: RunnerConfig, attention: TritonAttention, *, has_state: bool
    ) -> None:
        self._max_slots, self._max_batch_tokens = config.max_slots, config.max_batch_tokens
        self._is_invariant = config.numerics == "invariant"
        self._dequantizes_long = config.kv_dtype == "fp8"
        self._attention = attention
        self.rows = row_sizes(config.max_slots)
        # How rows are divided into chunks is decided on the host, so states rule out graphs here.
        largest = max(config.max_batch_tokens, config.max_slots)
        self.tokens = () if has_state else token_sizes(largest)

    def with_graphs(self) -> Iterator[Size]:
        return all_sizes(self.rows, self.tokens, can_share=self._attention.can_share)

    def largest(self) -> list[Size]:
        """One of these sizes has the longest arrays of all sizes that have graphs."""
        slots, tokens = self._max_slots, max(self.tokens, default=1)
        sizes = (decode_size(slots, True), Size(tokens, slots, slots, False, False))
        return [replace(size, num_adapters=lora.MAX_ADAPTERS) for size in sizes]

    def token_counts(self) -> tuple[int, ...]:
        """In invariant numerics: the numbers of tokens that steps have, with padding."""
        large = range(TOKEN_STEP, self._max_batch_tokens + TOKEN_STEP, TOKEN_STEP)
        return (*self.tokens, *large)

    def padded(self, inputs: BatchInputs, num_adapters: int) -> Size | None:
        """The padded size of a step, or None if the step is too large for a CUDA graph."""
        tokens, rows, samples = len(inputs.token_ids), len(inputs.slots), len(inputs.logit_rows)
        if tokens == rows == samples:
            bucket = at_least(self.rows, rows)
            if bucket is not None:
                size = decode_size(bucket, self._attention.has_shared(inputs))
                return replace(size, num_adapters=num_adapters)
        padded = at_least(self.tokens, tokens)
        if padded is None or (tokens > LONG_CHUNK and self._dequantizes(inputs)):
            return None
        size = replace(mixed_size(padded, self._max_slots), num_adapters=num_adapters)
        return size if rows <= size.rows and samples <= size.samples else None

    def exact(self, inputs: BatchInputs, num_adapters: int, *, shares: bool) -> Size:
        """The size of a step without a graph."""
        tokens, samples = len(inputs.token_ids), len(inputs.logit_rows)
        if self._is_invariant:  # the sizes for which `warm` has chosen kernels
            tokens = -(-tokens // TOKEN_STEP) * TOKEN_STEP
            samples = samples and (at_least(self.rows, samples) or samples)
        return Size(
            tokens,
            len(inputs.slots),
            samples,
            only_decodes=False,
            shares=shares,
            num_adapters=num_adapters,
        )

    def _dequantizes(self, inputs: BatchInputs) -> bool:
        """Whether prefill attention is much faster without a graph: with long rows in float8, which
        it dequantizes first.
        """
        lengths = inputs.seq_lens[np.diff(inputs.query_start) > 1]
        return self._dequantizes_long and len(lengths) > 0 and int(lengths.max()) > LONG_CHUNK
