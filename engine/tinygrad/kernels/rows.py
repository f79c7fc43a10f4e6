"""A kernel that looks up rows of a table by index, for embeddings."""

from tinygrad import Tensor, UOp

from engine.tinygrad.kernels.launch import index, launch, loop


def take_rows(table: Tensor, indices: Tensor) -> Tensor:
    """Copies the rows of a table at the given indices: table (V, D), indices (T,) -> (T, D)"""
    out = Tensor.empty(*indices.shape, table.shape[1], dtype=table.dtype, device=table.device)
    return launch("take_rows", _copy, out, table, indices)[0]


def _copy(out: UOp, table: UOp, indices: UOp) -> tuple[UOp, tuple[UOp, ...]]:
    t, d = loop(out.shape[0], 0), loop(out.shape[1], 1)
    return out[t, d].store(table[index(indices[t]), d].load()), (t, d)
