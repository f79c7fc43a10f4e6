"""Matmul with weights of 4 or 8 bits. Each small group of weights has a scale, and in some layouts
also a minimum.

For few input rows, kernels dequantize the weights in registers. For many input rows, a whole matrix
is dequantized to memory, multiplied and freed again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.torch.kernels.activation import gated_halves
from engine.torch.kernels.base import SUMMED, Example, Inputs, Shape, op, size_of, use_triton
from engine.torch.kernels.norm import rms_norm
from engine.torch.kernels.skinny import PLAIN, Fusion

# Max input rows for these kernels. With more rows, cuBLAS with dequantized weights is faster. A
# matrix with at most NARROW rows keeps too few programs busy, so that its limit is lower.
MAX_ROWS, MAX_NARROW_ROWS, NARROW = 128, 32, 8192


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A quantized matrix (F, D). With minima, a weight is scale * value + minimum. Without minima,
    it is scale * (value - 2 ** (bits - 1)).

    For 4-bit values, byte i of a group has value i in its low nibble and value i + group / 2 in its
    high nibble.
    """

    values: Tensor  # uint8 (F, D * bits / 8)
    scales: Tensor  # float16 (F, D / group)
    minima: Tensor | None  # float16 (F, D / group)
    bits: int  # 4 or 8
    group: int  # 16 or 32

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1] * 8 // self.bits

    @property
    def layout(self) -> tuple[int, int, bool]:
        """The bits per value, the group size, and whether there are minima. Matrices with the same
        layout can be stacked by rows.
        """
        return self.bits, self.group, self.minima is not None

    @property
    def nbytes(self) -> int:
        return size_of(self.values, self.scales, self.minima)


def grouped_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None = None, fusion: Fusion = PLAIN
) -> Tensor:
    """residual + act(rms_norm(x) W^T + bias), as `fused_linear`, but with quantized W."""
    if len(x) <= (MAX_NARROW_ROWS if weight.shape[0] <= NARROW else MAX_ROWS):
        return _grouped_linear(x, weight, bias, fusion)
    if fusion.norm is not None:
        x = rms_norm(x, fusion.norm, fusion.eps)
    return fusion.finished(F.linear(x, dequantize(weight, x.dtype), bias))


@op("grouped:grouped_linear")
def _grouped_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None, fusion: Fusion
) -> Tensor:
    if fusion.norm is not None:
        x = F.rms_norm(x, fusion.norm.shape, fusion.norm, fusion.eps)
    y = F.linear(x, dequantize.reference(weight, x.dtype), bias)
    return fusion.finished(y, gated_halves)


@op("grouped:dequantize", suits=lambda weight: use_triton(weight.values))
def dequantize(weight: GroupedWeight, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """Dequantizes the whole matrix, or only the matrix rows with the indices `rows` (R,). An
    embedding lookup uses the latter.
    """
    values, scales, minima = (
        each if each is None or rows is None else each[rows]
        for each in (weight.values, weight.scales, weight.minima)
    )
    assert values is not None and scales is not None
    groups = values.unflatten(1, (scales.shape[1], -1))  # (R, D / group, bytes)
    if weight.bits == 4:
        groups = torch.cat((groups & 15, groups >> 4), dim=-1)
    if minima is None:
        dense = (groups.float() - 2 ** (weight.bits - 1)) * scales.float()[..., None]
    else:
        dense = groups.float() * scales.float()[..., None] + minima.float()[..., None]
    return dense.flatten(1).to(dtype)


# The layouts that GGUF types are repacked to: bits per value, group size, and whether there are
# minima.
LAYOUTS = {
    "int4": (4, 32, False),
    "int4 minima": (4, 32, True),
    "int4/16": (4, 16, False),
    "int4/16 minima": (4, 16, True),
    "int8": (8, 32, False),
    "int8 minima": (8, 32, True),
    "int8/16": (8, 16, False),
}


def random_weight(
    inputs: Inputs, outputs: int, size: int, bits: int, group: int, has_minima: bool
) -> GroupedWeight:
    """A random quantized matrix for examples. Its weights have a variance of about 1 / size."""
    step = 3.4 / 2**bits * size**-0.5
    scales = ((0.5 + inputs.uniform(outputs, size // group)) * step).to(torch.float16)
    return GroupedWeight(
        inputs.integers(256, outputs, size * bits // 8, dtype=torch.uint8),
        scales,
        (scales * -(2.0 ** (bits - 1) - 0.7)).to(torch.float16) if has_minima else None,
        bits,
        group,
    )


def _linear_examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    hidden, inner = shape.hidden_size, shape.inner_size
    norm, bias = inputs.normal(hidden), inputs.normal(2 * inner)
    gated_and_normed = Fusion(norm, 1e-5, "silu")
    for name, layout in LAYOUTS.items():
        down = random_weight(inputs, hidden, inner, *layout)
        for rows in (each for each in shape.rows if each <= MAX_ROWS):
            stream, inside = inputs.normal(rows, hidden), inputs.normal(rows, inner)
            added = Fusion(residual=stream)
            yield Example(f"{name} down {rows}", (inside, down, None, added))
            if name == "int4 minima":
                up = random_weight(inputs, 2 * inner, hidden, *layout)
                yield Example(f"{name} gate_up {rows}", (stream, up, bias, gated_and_normed))


def _dequantize_examples(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    for name, layout in LAYOUTS.items():
        weight = random_weight(inputs, shape.inner_size, shape.hidden_size, *layout)
        yield Example(name, (weight, dtype))
        yield Example(f"{name} 5 rows", (weight, dtype, inputs.integers(shape.inner_size, 5)))


def _linear_bytes(x: Tensor, weight: GroupedWeight, bias: Tensor | None, fusion: Fusion) -> int:
    return size_of(x, bias) + weight.nbytes + len(x) * weight.shape[0] * x.element_size()


def _dequantize_bytes(weight: GroupedWeight, dtype: torch.dtype, rows: Tensor | None = None) -> int:
    outputs, size = weight.shape
    count = outputs if rows is None else len(rows)
    return count * weight.nbytes // outputs + count * size * dtype.itemsize


_grouped_linear.specify(
    _linear_examples,
    _linear_bytes,
    flops_of=lambda x, weight, *_: 2 * x.numel() * weight.shape[0],
    tolerance=SUMMED,
)
dequantize.specify(_dequantize_examples, _dequantize_bytes, tolerance=SUMMED)
