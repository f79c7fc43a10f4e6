"""Chooses the kernel of each plan step and splits its work among threads.

The kernel depends on the CPU, the weight layout and the chosen precision. It never depends on the
number of tokens in the batch, so a token's result is the same in every batch. The split among
threads depends on the number of tokens, but does not change the arithmetic.
"""

import math

from engine.ir.plan import (
    PANEL_ROWS,
    Kernel,
    Machine,
    PackedMatrix,
    Precision,
    Split,
)
from engine.ir.types import Numerics

# Claiming work costs a thread about 0.1 us. A claim of this many multiply-adds takes about 2 us, so
# the overhead is small.
_CLAIM_WORK = 1 << 16
# A matmul is split so that each thread can make at least this many claims, if possible. With many
# small claims, threads finish at about the same time.
_CLAIMS = 4
_HALVES = ("F16", "BF16")
_TILED_ATTENTION = ("amx",)  # instruction sets that have tiled attention kernels


def matmul_kernel(
    layout: str, machine: Machine, precision: Precision, few_rows: bool = False
) -> Kernel:
    """The arithmetic of a matmul whose weights have this layout.

    Matmuls with float32 weights compute in float32. For other weights, prefill uses bfloat16 if the
    CPU has bfloat16 kernels, because these are fast for many tokens. Decode with quantized weights
    quantizes the activations to int8 in groups and does not dequantize the weights. Without
    bfloat16, prefill does the same but keeps outliers in float. `few_rows` is set for matmuls after
    the last attention, which run only for tokens whose logits are needed. They never use bfloat16.
    """
    if precision.exact or layout == "F32":
        return Kernel("f32", "f32")
    decode: Numerics = "f32" if layout in _HALVES else "int8"
    if machine.has_bf16:
        return Kernel(decode, decode if few_rows else "bf16")
    return Kernel(decode, "int8_outliers" if decode == "int8" else decode)


def attention_kernel(machine: Machine, precision: Precision, has_latent: bool = False) -> Kernel:
    """The arithmetic of attention. Prefill uses tiled bfloat16 kernels if the CPU has them and the
    KV cache is bfloat16. There are none for a cache of latents, which has no values.
    """
    tiled = machine.instruction_set in _TILED_ATTENTION and precision.kv_type == "bfloat16"
    tiled = tiled and not has_latent
    return Kernel("f32", "bf16" if tiled else "f32")


def split(matrix: PackedMatrix, gated: bool, rows: int, machine: Machine) -> Split:
    """Splits a matmul with up to `rows` tokens into claims, the pieces of work that threads take.
    Each claim has enough work to be worth its cost, and there are enough claims for all threads.
    """
    panels = 2 if gated else 1
    units = math.ceil(matrix.rows / (panels * PANEL_ROWS))
    if machine.threads == 1:
        return Split(units, units)
    unit_work = panels * PANEL_ROWS * matrix.columns * rows
    worthwhile = math.ceil(_CLAIM_WORK / unit_work)
    shared = units // (machine.threads * _CLAIMS)
    return Split(units, max(1, min(worthwhile, shared)))
