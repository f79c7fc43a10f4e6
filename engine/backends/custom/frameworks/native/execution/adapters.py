"""Packs LoRA adapters for the native kernels.

A site is a matmul of the plan that adapters may change. The matmul may be fused from several
weights. Then A has the ranks of all of them, one after the other, and B is block-diagonal. The
matrices are stored as the kernels of the matmul compute: in 8 bits beside quantized weights, else
in float32.
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

    sites: list[tuple[int, Packed, Packed, int]]
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
    num_bytes = sum(a[3].nbytes + b[3].nbytes for _, a, b, _ in packed)
    num_bytes += 0 if embedding is None else sum(each.nbytes for each in embedding)
    return PackedAdapter(packed, embedding, num_bytes)


def _matrices(site: Site, pairs: list[LoraPair | None]) -> tuple[Packed, Packed]:
    ranks = sum(pair.rank for pair in pairs if pair is not None)
    columns = -(-ranks // GROUP) * GROUP
    parts, first = [], 0
    for rows, pair in zip(site.rows, pairs, strict=True):
        part = np.zeros((rows, columns), np.float32)
        if pair is not None:
            part[:, first : first + pair.rank] = pair.b
            first += pair.rank
        parts.append(part)
    a = np.concatenate([pair.a for pair in pairs if pair is not None])
    stored_as = "Q8_0" if site.numerics == "int8" else "F32"
    layout, _, _, panels = _packed([a], stored_as, interleaved=False)
    of_b = _packed(parts, stored_as, site.interleaved)
    return (layout, ranks, site.columns, panels), of_b


def _packed(parts: list[F32], stored_as: str, interleaved: bool) -> Packed:
    """Packs the rows of all parts into panels."""
    native = kernels()
    layout, columns = native.layout_of(stored_as), parts[0].shape[1]
    if interleaved:
        num_panels = sum(-(-len(part) // PANEL_ROWS) for part in parts)
    else:
        num_panels = -(-sum(map(len, parts)) // PANEL_ROWS)
    panels = _aligned(num_panels * native.panel_bytes(layout, columns))
    stored: list[tuple[Any, ...]] = [
        (stored_as, quantize(stored_as, part), len(part), None, False) for part in parts
    ]
    native.repack([(layout, columns, interleaved, stored, panels)], 1)
    return layout, num_panels * PANEL_ROWS, columns, panels


def _aligned(num_bytes: int) -> np.ndarray:
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]
