"""Chooses each plan step's kernel from the CPU, the weight layout and the precision; splits work.

The choice never depends on how many rows share a step, so a row's result does not depend on its
batch. The split does depend on it: it divides work among threads and changes no arithmetic.
"""

import math

from engine.backends.custom.ir.plan import (
    PANEL_ROWS,
    Kernel,
    Machine,
    PackedMatrix,
    Precision,
    Split,
)
from engine.backends.custom.ir.types import Numerics

# A thread claims work at about 0.1 us per claim; this many multiplications take some 2 us.
_CLAIM_WORK = 1 << 16
# Each thread gets at least this many claims, so that threads finish at about the same time.
_CLAIMS = 4
_HALVES = ("F16", "BF16")
_TILED_ATTENTION = ("amx",)  # instruction sets that have tiled attention kernels


def matmul_kernel(
    layout: str, machine: Machine, precision: Precision, few_rows: bool = False
) -> Kernel:
    """Every layout that is not a float layout is quantized.

    A float32 file is computed in float32. For other files, prefill uses bfloat16 where the CPU has
    it, because it has many rows at once. Decode quantizes activations to int8 in groups and reads
    quantized weights as they are. `few_rows`: prefill tokens also use the decode arithmetic in this
    plan step, as for logits.
    """
    if precision.exact or layout == "F32":
        return Kernel("f32", "f32")
    decode: Numerics = "f32" if layout in _HALVES else "int8"
    return Kernel(decode, "bf16" if machine.has_bf16 and not few_rows else decode)


def attention_kernel(machine: Machine, precision: Precision) -> Kernel:
    """Prefill uses tiled attention if the CPU has it and the cache type suits the tiles."""
    tiled = machine.instruction_set in _TILED_ATTENTION and precision.kv_type == "bfloat16"
    return Kernel("f32", "bf16" if tiled else "f32")


def split(matrix: PackedMatrix, gated: bool, rows: int, machine: Machine) -> Split:
    """Claims large enough to pay for themselves and enough to share, for up to `rows` tokens."""
    panels = 2 if gated else 1
    units = math.ceil(matrix.rows / (panels * PANEL_ROWS))
    if machine.threads == 1:
        return Split(units, units)
    unit_work = panels * PANEL_ROWS * matrix.columns * rows
    worthwhile = math.ceil(_CLAIM_WORK / unit_work)
    shared = units // (machine.threads * _CLAIMS)
    return Split(units, max(1, min(worthwhile, shared)))
