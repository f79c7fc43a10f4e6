"""Packs LoRA adapters for the native kernels.

A site is a matmul of the plan that adapters may change. The matmul may be fused from several
weights. Then A has the ranks of all of them, one after the other. The panels of B have the ranks of
their own weight. Beside quantized weights, A and B have 8 bits, else both are float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from engine.adapters.matrices import EMBED, F32, HEAD, Adapter, LoraPair
from engine.ir.plan import PANEL_ROWS, ExecutionPlan, LinearStep
from engine.native.compiled import kernels
from engine.native.execution.program import NUMERICS
from engine.weights.quantize import quantize

GROUP = 32  # columns of a packed matrix are padded to a multiple of this
_ALIGNMENT = 64
Packed = tuple[int, int, int, np.ndarray]  # layout, rows, columns, panels
# The values of all panels, (offset, first rank, number of ranks, first group of ranks) of each
# panel, and whether the values are bytes. Otherwise they are float32. See RankPanel in kernels.h.
Expanding = tuple[np.ndarray, np.ndarray, bool]
# An argument of `pack_lora`: columns, (A, B, room for B) of each weight, room for A.
LoraJob = tuple[int, list[tuple[F32, F32, np.ndarray]], np.ndarray]


@dataclass(frozen=True, slots=True)
class AdaptedMatmul:
    """A matmul of the plan. `parts` are the weights that it is fused from, and `rows` the number of
    output channels of each.
    """

    parts: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    interleaved: bool
    numerics: str  # "f32" or "int8"


@dataclass(frozen=True, slots=True)
class NativeAdapter:
    """A packed adapter: the arguments of `Model.set_adapter`."""

    sites: list[tuple[int, Packed, Expanding, int]]
    embedding: tuple[F32, F32] | None
    whole: tuple[F32 | None, tuple[Packed, int] | None]  # embeddings; the head and its numerics
    num_bytes: int


def sites_of(plan: ExecutionPlan, rows_of: Mapping[str, int]) -> tuple[AdaptedMatmul, ...]:
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
            sites.append(AdaptedMatmul(parts, rows, matrix.columns, matrix.interleaved, numerics))
    return tuple(sites)


def pack_adapter(sites: tuple[AdaptedMatmul, ...], adapter: Adapter) -> NativeAdapter:
    """Most of the time is spent in one call without the GIL, so that other threads are not held."""
    packed, jobs = [], []
    for number, site in enumerate(sites):
        pairs = [adapter.pairs.get(part) for part in site.parts]
        if any(pair is not None for pair in pairs):
            a, b, job = _matrices(site, _parts(site, pairs))
            packed.append((number, a, b, NUMERICS.index(site.numerics)))
            jobs += [] if job is None else [job]
    kernels().pack_lora(jobs)
    embedding = None
    if (pair := adapter.pairs.get(EMBED)) is not None:
        embedding = (np.ascontiguousarray(pair.a.T), np.ascontiguousarray(pair.b.T))
    num_bytes = sum(a[3].nbytes + b[0].nbytes + b[1].nbytes for _, a, b, _ in packed)
    num_bytes += 0 if embedding is None else sum(each.nbytes for each in embedding)
    head = _whole_head(sites, adapter.whole)
    num_bytes += sum(each.nbytes for each in adapter.whole.values())
    return NativeAdapter(packed, embedding, (adapter.whole.get(EMBED), head), num_bytes)


def _whole_head(
    sites: tuple[AdaptedMatmul, ...], whole: Mapping[str, F32]
) -> tuple[Packed, int] | None:
    if HEAD not in whole:
        return None
    (numerics,) = (site.numerics for site in sites if site.parts == (HEAD,))
    stored = "Q8_0" if numerics == "int8" else "F32"
    return _stored_panels(whole[HEAD], stored), NUMERICS.index(numerics)


def _parts(site: AdaptedMatmul, pairs: list[LoraPair | None]) -> list[LoraPair]:
    """The matrices of each weight of a site; those of a weight without an adapter have no ranks."""
    parts = [
        LoraPair(np.zeros((0, site.columns), np.float32), np.zeros((rows, 0), np.float32))
        if pair is None
        else pair
        for rows, pair in zip(site.rows, pairs, strict=True)
    ]
    if not site.interleaved and any(rows % PANEL_ROWS for rows in site.rows[:-1]):
        # Some panels have channels of two weights.
        return [LoraPair(np.concatenate([each.a for each in parts]), _diagonal(parts))]
    return parts


def _matrices(
    site: AdaptedMatmul, parts: list[LoraPair]
) -> tuple[Packed, Expanding, LoraJob | None]:
    """Room for the panels of A and B, and what has to be written there. Floats are written at
    once.
    """
    in_8_bits = site.numerics == "int8"
    shapes = tuple(each.b.shape for each in parts)
    table, places, size = _table(shapes, site.interleaved, in_8_bits)
    memory = _aligned(size)
    expanding = (memory, table, in_8_bits)
    rooms = [memory[begin:end] for begin, end in places]
    if not in_8_bits:
        for part, room in zip(parts, rooms, strict=True):
            room.view(np.float32)[:] = _panels(part.b).ravel()
        return _stored_panels(np.concatenate([each.a for each in parts]), "F32"), expanding, None
    native = kernels()
    layout, ranks = native.layout_of("Q8_0"), sum(part.rank for part in parts)
    panels = _aligned(-(-ranks // PANEL_ROWS) * native.panel_bytes(layout, site.columns))
    weights = [(part.a, part.b, room) for part, room in zip(parts, rooms, strict=True) if part.rank]
    job = (site.columns, weights, panels)
    return (layout, ranks, site.columns, panels), expanding, job


@lru_cache(256)  # the sites of all layers, and of all adapters with the same ranks, are alike
def _table(
    shapes: tuple[tuple[int, int], ...], interleaved: bool, in_8_bits: bool
) -> tuple[np.ndarray, list[tuple[int, int]], int]:
    """The table of `Expanding` for parts of B with these shapes, the place of each part in bytes,
    and the size of all.
    """
    tables, places, offset, first, group = [], [], 0, 0, 0
    for rows, ranks in shapes:
        num_panels, groups = -(-rows // PANEL_ROWS), -(-ranks // GROUP)
        size = 64 * (-(-ranks // 4) + groups) if in_8_bits else PANEL_ROWS * ranks
        table = np.empty((num_panels, 4), np.int32)
        table[:, 0] = offset + np.arange(num_panels) * size
        table[:, 1:] = first, ranks, group
        tables.append(table)
        places.append((offset, offset + num_panels * size))
        offset, first, group = offset + num_panels * size, first + ranks, group + groups
    stacked = np.stack(tables, axis=1) if interleaved else np.concatenate(tables)
    width = 1 if in_8_bits else 4
    ends = [(width * begin, width * end) for begin, end in places]
    return np.ascontiguousarray(stacked.reshape(-1, 4)), ends, width * offset


def _panels(b: F32) -> F32:
    """B in panels of output channels: 16 channels of each rank."""
    num_panels = -(-len(b) // PANEL_ROWS)
    padded = np.zeros((num_panels * PANEL_ROWS, b.shape[1]), np.float32)
    padded[: len(b)] = b
    return padded.reshape(num_panels, PANEL_ROWS, b.shape[1]).transpose(0, 2, 1)


def _diagonal(parts: list[LoraPair]) -> F32:
    """One B with the ranks of all parts."""
    shapes = [each.b.shape for each in parts]
    made = np.zeros(
        (sum(rows for rows, _ in shapes), sum(ranks for _, ranks in shapes)), np.float32
    )
    row = first = 0
    for part in parts:
        rows, ranks = part.b.shape
        made[row : row + rows, first : first + ranks] = part.b
        row, first = row + rows, first + ranks
    return made


def _stored_panels(matrix: F32, stored_as: str) -> Packed:
    """Packs the rows of a matrix into panels of this type."""
    native = kernels()
    layout, (rows, columns) = native.layout_of(stored_as), matrix.shape
    panels = _aligned(-(-rows // PANEL_ROWS) * native.panel_bytes(layout, columns))
    stored: list[tuple[Any, ...]] = [(stored_as, quantize(stored_as, matrix), rows, None, False)]
    native.repack([(layout, columns, False, stored, panels)], 1)
    return layout, rows, columns, panels


def _aligned(num_bytes: int) -> np.ndarray:
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]
