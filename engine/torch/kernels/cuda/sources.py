"""Assembles the source of a kernel from the compile-time sizes, the shared headers, WGMMA
instructions and the kernel's file. The text of a WGMMA instruction depends on the sizes, so it is
generated here.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

TARGET = "sm_90a"
DEPTH = 64  # 16-bit values in a 128-byte swizzle row
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}


def source_of(name: str, dtype: torch.dtype, sizes: Mapping[str, int], *instructions: str) -> str:
    defined = {**sizes, "IN": f'"{NAMES[dtype]}"'}
    lines = [f"#define {key} {value}" for key, value in defined.items()]
    folder = Path(__file__).parent
    files = ("hopper.cuh", "ring.cuh", f"{name}.cu")
    *shared, own = ((folder / file).read_text("utf-8") for file in files)
    return "\n".join([*lines, *shared, *instructions, own])


def wgmma(name: str, columns: int, dtype: torch.dtype, *, from_registers: bool = False) -> str:
    """The source of a device function with one WGMMA instruction of a warp group.

    The instruction multiplies a 64 x 16 matrix by a 16 x columns matrix. It adds the product to
    sums, or overwrites the sums if `adds` is 0. Each thread has columns / 2 of the sums in
    registers. Without `from_registers`, both matrices are in shared memory, contiguous along the
    dimension of size 16. With `from_registers`, the left matrix is in registers, and the right
    matrix is contiguous along its columns.
    """
    count, kind = columns // 2, NAMES[dtype]
    places = ", ".join(f"%{index}" for index in range(count))
    sums = ", ".join(f'"+f"(sums[{index}])' for index in range(count))
    if from_registers:
        given = "u32 a, u32 b, u32 c, u32 d"
        left = "{" + ", ".join(f"%{count + index}" for index in range(4)) + "}"
        operands, used, signs = '"r"(a), "r"(b), "r"(c), "r"(d)', 4, "1, 1, 1"
    else:
        given, left, operands, used, signs = "u64 x", f"%{count}", '"l"(x)', 1, "1, 1, 0, 0"
    return f"""
__device__ __forceinline__ void {name}(float (&sums)[{count}], {given}, u64 right, int adds) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + used + 1}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{places}}}, "
        "{left}, %{count + used}, p, {signs};\\n}}"
        : {sums} : {operands}, "l"(right), "r"(adds));
}}
"""
