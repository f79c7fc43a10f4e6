"""Which kernel a step gets, by the machine, the weights and what was asked for; how work is split.

A kernel is never chosen by how many rows share a step, so that a row's result does not depend on
them. The split does depend on it: it says who computes what, never how.
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

# A claim costs about 0.1 us; this much work, in multiplications, takes some 2 us.
_CLAIM_WORK = 1 << 16
# Each thread gets this many claims at least, so that the last one to finish is not waited for long.
_CLAIMS = 4
_HALVES = ("F16", "BF16")
_TILED_ATTENTION = ("amx",)  # instruction sets with kernels for it


def product_kernel(
    layout: str, machine: Machine, precision: Precision, few_rows: bool = False
) -> Kernel:
    """By the layout of the weights; what is not a layout of floats is quantized.

    A file of float32 weights is computed in float32. Other prompts go through bfloat16 where the
    CPU has it, being many rows at once; a generated token is rounded to 8 bits in groups, which
    reads quantized weights as they are. `few_rows`: so are prompts in this step, as for logits.
    """
    if precision.exact or layout == "F32":
        return Kernel("f32", "f32")
    decode: Numerics = "f32" if layout in _HALVES else "int8"
    return Kernel(decode, "bf16" if machine.has_bf16 and not few_rows else decode)


def attention_kernel(machine: Machine, precision: Precision) -> Kernel:
    """Prompts go through tiles where the CPU has them and the cache is stored as they read it."""
    tiled = machine.instruction_set in _TILED_ATTENTION and precision.kv_type == "bfloat16"
    return Kernel("f32", "bf16" if tiled else "f32")


def split(matrix: PackedMatrix, gated: bool, rows: int, machine: Machine) -> Split:
    """Claims that are worth their price, and enough of them to share; for up to `rows` tokens."""
    panels = 2 if gated else 1
    units = math.ceil(matrix.rows / (panels * PANEL_ROWS))
    if machine.threads == 1:
        return Split(units, units)
    unit_work = panels * PANEL_ROWS * matrix.columns * rows
    worthwhile = math.ceil(_CLAIM_WORK / unit_work)
    shared = units // (machine.threads * _CLAIMS)
    return Split(units, max(1, min(worthwhile, shared)))
