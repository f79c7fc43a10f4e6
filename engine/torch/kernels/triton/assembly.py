"""PTX, and what only NVIDIA GPUs have. AMD GPUs and Triton's interpreter run the plain Triton code
beside it.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.torch.device import is_amd, overlaps_kernels
from engine.torch.kernels.base import interpreting

_HAS_PTX = tl.constexpr(not interpreting() and not is_amd())
FP8_FACTOR = tl.constexpr(1.0 if _HAS_PTX.value else 256.0)
# Four bytes become the second bytes (8 bits), or the third bytes (4 bits), of four float32 numbers.
# The last byte of each has the exponent, 0x47 or 0x43, and the other bytes are zero.
_BYTES_8 = tl.constexpr(
    "prmt.b32 $0, $4, 0x47, 0x4505; prmt.b32 $1, $4, 0x47, 0x4515;"
    "prmt.b32 $2, $4, 0x47, 0x4525; prmt.b32 $3, $4, 0x47, 0x4535;"
)
_THIRD_BYTES = (
    "prmt.b32 $0, t, 0x43, 0x4055; prmt.b32 $1, t, 0x43, 0x4155;"
    "prmt.b32 $2, t, 0x43, 0x4255; prmt.b32 $3, t, 0x43, 0x4355; }"
)
_BYTES_LOW = tl.constexpr("{ .reg .b32 t; and.b32 t, $4, 0x0F0F0F0F;" + _THIRD_BYTES)
_BYTES_HIGH = tl.constexpr(
    "{ .reg .b32 t; shr.b32 t, $4, 4; and.b32 t, t, 0x0F0F0F0F;" + _THIRD_BYTES
)


@triton.jit
def float_bits(packed, BITS: tl.constexpr, HIGH: tl.constexpr):
    """The bits of float32 numbers that have quantized values in their fractions. Conversions of
    integers are slow. With HIGH, 4-bit values are in the upper halves of the bytes.
    """
    if _HAS_PTX:
        bits = tl.inline_asm_elementwise(
            _BYTES_8 if BITS == 8 else _BYTES_HIGH if HIGH else _BYTES_LOW,
            "=r,=r,=r,=r,r",
            [packed],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    else:
        word = packed.to(tl.int32)
        if BITS == 8:
            bits = (word << 8) | 0x47000000
        else:
            bits = (((word >> 4 if HIGH else word) & 15) << 16) | 0x43000000
    return bits


@triton.jit
def fp8_to_float16(words):
    """Converts words of four float8 numbers. Returns the bits of the first two as float16 numbers,
    and those of the other two. The numbers must be multiplied by FP8_FACTOR. Without PTX, a float16
    number has the bits of the float8 number as its upper bits, so its exponent is too small.
    """
    if _HAS_PTX:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r",
            [words],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        low = _float16_bits((words & 0xFF) | ((words & 0xFF00) << 8))
        high = _float16_bits(((words >> 16) & 0xFF) | ((words >> 8) & 0xFF0000))
    return low, high


@triton.jit
def _float16_bits(pair):
    """The bits of two float16 numbers that are 1 / 256 of two float8 numbers, which have the bits
    0 to 7 and 16 to 23.
    """
    return ((pair << 8) & -0x7FFF8000) | ((pair << 7) & 0x3F803F80)


@triton.jit
def launch_dependents():
    """Lets the next kernel start before this one ends. NVIDIA GPUs only."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Waits for the previous kernel, whose results are visible from here on. NVIDIA GPUs only."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """The first lines of a kernel that may start before the previous one ends, if all that it reads
    may be a result of that kernel. So only its launch overlaps.
    """
    if OVERLAPS:
        launch_dependents()
        wait_for_previous()


def overlapping(x: Tensor) -> dict[str, bool]:
    """Options of a kernel that starts before the previous one ends, where the GPU can do that."""
    overlaps = overlaps_kernels(x.device)
    return {"OVERLAPS": overlaps} | ({"launch_pdl": True} if overlaps else {})
