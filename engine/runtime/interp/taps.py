"""The taps of a step, as arrays for the model runner: which values are read or changed, where."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np

from engine.architectures.base import ModelConfig
from engine.architectures.sites import Site
from engine.runtime.model_runner import F32, I32

# What a tap does with the row x of a token at a site. v is a vector, s its scale. The numbers are
# those of TapKind in csrc/executor/taps.h.
CAPTURE = 0  # copies x
ADD = 1  # x + s v
SCALE = 2  # s x
SET = 3  # s v
PROJECT_OUT = 4  # x - s (x . v) v, where v has unit length
CLAMP = 5  # x + (s - f) d, where f is a feature of a sparse autoencoder and d its decoder row
# The columns of a vector's row after its values: bias and threshold of a feature (CLAMP only)
EXTRA_COLUMNS = 2


@dataclass(frozen=True, slots=True, eq=False)
class TapInputs:
    """N taps, sorted by site and then by token. The taps of a token at a site are applied in order,
    so a capture sees what the edits before it made. Consecutive steps with the same taps have the
    same object.
    """

    sites: I32  # (N,) index into `Tappable.sites`
    tokens: I32  # (N,) index into T
    kinds: I32  # (N,)
    # (N,) CAPTURE: the row of the result. Otherwise: the row of `vectors`. CLAMP reads the vector
    # of the encoder in this row, and that of the decoder in the next.
    rows: I32
    scales: F32  # (N,)
    vectors: F32  # (M, W + EXTRA_COLUMNS) padded on the right
    num_captured: int
    width: int  # W: at least the width of every site in `sites`

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, taps: tuple["Taps", ...], widths: tuple[int, ...]) -> "TapInputs":
        """The taps of a step's rows. `widths` are the widths of all sites."""
        sites = np.concatenate([each.sites for each in taps])
        tokens = np.concatenate([each.tokens for each in taps])
        kinds = np.concatenate([each.kinds for each in taps])
        width = max(widths[site] for site in set(sites.tolist()))
        num_vectors = sum(len(each.vectors) for each in taps)
        vectors = np.zeros((max(1, num_vectors), width + EXTRA_COLUMNS), np.float32)
        rows = []
        start = num_captured = 0
        for each in taps:
            rows.append(each.rows + np.where(each.kinds == CAPTURE, num_captured, start))
            for vector in each.vectors:
                vectors[start, : len(vector) - EXTRA_COLUMNS] = vector[:-EXTRA_COLUMNS]
                vectors[start, -EXTRA_COLUMNS:] = vector[-EXTRA_COLUMNS:]
                start += 1
            num_captured += each.num_captured
        order = np.lexsort((tokens, sites))  # stable: edits of a token stay in order
        return cls(
            sites[order],
            tokens[order],
            kinds[order],
            np.concatenate(rows)[order].astype(np.int32),
            np.concatenate([each.scales for each in taps])[order],
            vectors,
            num_captured,
            width,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """The taps of one row of the batch. `rows` count from this row's first vector or capture."""

    sites: I32
    tokens: I32
    kinds: I32
    rows: I32
    scales: F32
    vectors: tuple[F32, ...]  # each with its EXTRA_COLUMNS
    num_captured: int


@runtime_checkable
class Tappable(Protocol):
    """A runner that takes taps. Its `StepOutput.captured` has the rows that a step captured."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of the model, in the order in which a step computes them."""
        ...

    def unembed(self, x: F32) -> F32:
        """(N, D) -> (N, V) The logits of residual streams after the last layer, by the model's own
        final norm and LM head. Called between steps.
        """
        ...

    def head_row(self, token_id: int) -> F32:
        """(D,) The token's row of the LM head, times the weights of the final norm."""
        ...
