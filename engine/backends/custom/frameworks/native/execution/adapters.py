"""Packs LoRA adapters for the native kernels.

A site is a matmul of the plan that adapters may change. The matmul may be fused from several
weights. Then A has the ranks of all of them, one after the other. The panels of B have the ranks of
their own weight. Beside quantized weights, A has 8 bits and B is bfloat16, else both are float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.backends.custom.adapters.matrices import EMBED, F32, HEAD, Adapter, LoraPair
from engine.backends.custom.frameworks.native.compiled import kernels
from engine.backends.custom.frameworks.native.execution.program import NUMERICS
from engine.backends.custom.ir.plan import PANEL_ROWS, ExecutionPlan, LinearStep
from engine.backends.custom.weights.quantize import quantize

GROUP = 32  # columns of a packed matrix are padded to a multiple of this
_ALIGNMENT = 64
Packed = tuple[int, int, int, np.ndarray]  # layout, rows, columns, panels
# The values of all panels, (offset, first rank, number of ranks) of each panel, and whether the
# values are bfloat16. Otherwise they are float32.
Expanding = tuple[np.ndarray, np.ndarray, bool]


@dataclass(frozen=True, slots=True)
class Site:
    """A matmul of the plan. `parts` are the weights that it is fused from, and `rows` the number of
    output channels of each.
    """

    parts: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    interleaved: bool
    numerics: str  # "f32" or "int8"


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """The arguments of `Model.set_adapter`."""

    sites: list[tuple[int, Packed, Expanding, int]]
    embedding: tuple[F32, F32] | None
    num_bytes: int


def sites_of(plan: ExecutionPlan, rows_of: Mapping[str, int]) -> tuple[Site, ...]:
    """The sites of a plan, in the order of its matmuls. `rows_of` has the output channels of each
    weight.
    """
    matrices = {matrix.name: matrix for matrix in plan.matrices}
    sites = []
    for step in plan.steps:
        if isinstance(step, LinearStep):
            matrix = matrices[step.matrix]
            rows = tuple(rows_of[part] for part in matrix.parts)
            parts = (HEAD,) if matrix.parts == (EMBED,) else matrix.parts
            fits = matrix.columns % GROUP == 0
            numerics = "int8" if step.kernel.decode == "int8" and fits else "f32"
            sites.append(Site(parts, rows, matrix.columns, matrix.interleaved, numerics))
    return tuple(sites)


def pack_adapter(sites: tuple[Site, ...], adapter: Adapter) -> PackedAdapter:
    packed = []
    for number, site in enumerate(sites):
        pairs = [adapter.pairs.get(part) for part in site.parts]
        if any(pair is not None for pair in pairs):
            packed.append((number, *_matrices(site, pairs), NUMERICS.index(site.numerics)))
    embedding = None
    if (pair := adapter.pairs.get(EMBED)) is not None:
        embedding = (np.ascontiguousarray(pair.a.T), np.ascontiguousarray(pair.b.T))
    num_bytes = sum(a[3].nbytes + b[0].nbytes + b[1].nbytes for _, a, b, _ in packed)
    num_bytes += 0 if embedding is None else sum(each.nbytes for each in embedding)
    return PackedAdapter(packed, embedding, num_bytes)


def _matrices(site: Site, pairs: list[LoraPair | None]) -> tuple[Packed, Expanding]:
    a = np.concatenate([pair.a for pair in pairs if pair is not None])
    in_8_bits = site.numerics == "int8"
    return _packed(a, "Q8_0" if in_8_bits else "F32"), _expanding(site, pairs, in_8_bits)


def _expanding(site: Site, pairs: list[LoraPair | None], is_bf16: bool) -> Expanding:
    """B by panels of output channels, each with the ranks of its own weight."""
    parts, first = [], 0
    for rows, pair in zip(site.rows, pairs, strict=True):
        b = np.zeros((rows, 0), np.float32) if pair is None else pair.b
        parts.append((b, first))
        first += b.shape[1]
    if not site.interleaved and any(rows % PANEL_ROWS for rows in site.rows[:-1]):
        parts = [(_diagonal(parts, first), 0)]  # some panels have channels of two weights
    values, tables, offset = [], [], 0
    for b, first in parts:
        rank, num_panels = b.shape[1], -(-len(b) // PANEL_ROWS)
        padded = np.zeros((num_panels * PANEL_ROWS, rank), np.float32)
        padded[: len(b)] = b
        values.append(padded.reshape(num_panels, PANEL_ROWS, rank).transpose(0, 2, 1).ravel())
        table = np.empty((num_panels, 3), np.int32)
        table[:, 0] = offset + np.arange(num_panels) * rank * PANEL_ROWS
        table[:, 1:] = first, rank
        tables.append(table)
        offset += values[-1].size
    stacked = np.stack(tables, axis=1) if site.interleaved else np.concatenate(tables)
    stored = np.concatenate(values)
    stored = _bf16(stored) if is_bf16 else stored
    memory = _aligned(stored.nbytes)
    memory[:] = stored.view(np.uint8)
    return memory, np.ascontiguousarray(stacked.reshape(-1, 3)), is_bf16


def _diagonal(parts: list[tuple[F32, int]], ranks: int) -> F32:
    """One matrix with the ranks of all parts."""
    made = np.zeros((sum(len(b) for b, _ in parts), ranks), np.float32)
    row = 0
    for b, first in parts:
        made[row : row + len(b), first : first + b.shape[1]] = b
        row += len(b)
    return made


def _bf16(values: F32) -> np.ndarray:
    """Rounds to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _packed(a: F32, stored_as: str) -> Packed:
    """Packs the rows of A into panels."""
    native = kernels()
    layout, (rows, columns) = native.layout_of(stored_as), a.shape
    panels = _aligned(-(-rows // PANEL_ROWS) * native.panel_bytes(layout, columns))
    stored: list[tuple[Any, ...]] = [(stored_as, quantize(stored_as, a), rows, None, False)]
    native.repack([(layout, columns, False, stored, panels)], 1)
    return layout, rows, columns, panels


def _aligned(num_bytes: int) -> np.ndarray:
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]
