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
from engine.torch.kernels.cuda import grouped as hopper
from engine.torch.kernels.cuda.grouped import BLOCK_COLUMNS, TILE_ROWS
from engine.torch.kernels.norm import rms_norm
from engine.torch.kernels.skinny import PLAIN, Fusion

# Max input rows for these kernels. With more rows, cuBLAS with dequantized weights is faster. A
# matrix with at most NARROW rows keeps too few programs busy, so that its limit is lower.
MAX_ROWS, MAX_NARROW_ROWS, NARROW = 128, 32, 8192
RUN = 32  # columns whose 4-bit values are packed together; fewer if a group has fewer
PIECE = 16  # bytes that a tiled matrix keeps together


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A quantized matrix (F, D). With minima, a weight is scale * value + minimum. Without minima,
    it is scale * (value - 2 ** (bits - 1)).

    Values are packed in runs of `run` columns. For 4-bit values, byte i of a run has value i in its
    low nibble and value i + run / 2 in its high nibble. A tiled matrix has the same bytes in the
    order that `tiled` describes.
    """

    values: Tensor  # uint8 (F, D * bits / 8)
    scales: Tensor  # float16 (F, D / group)
    minima: Tensor | None  # float16 (F, D / group)
    bits: int  # 4 or 8
    group: int  # 16, 32 or 128
    is_tiled: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1] * 8 // self.bits

    @property
    def run(self) -> int:
        return min(self.group, RUN)

    @property
    def layout(self) -> tuple[int, int, bool]:
        """The bits per value, the group size, and whether there are minima. Matrices with the same
        layout can be stacked by rows, before they are tiled.
        """
        return self.bits, self.group, self.minima is not None

    @property
    def nbytes(self) -> int:
        return size_of(self.values, self.scales, self.minima)


def prepared(weight: GroupedWeight) -> GroupedWeight:
    """The same matrix in the form that the fastest kernels of its device read."""
    if weight.is_tiled or not hopper.supports(weight):
        return weight
    return tiled(simplified(weight))


def simplified(weight: GroupedWeight) -> GroupedWeight:
    """The same matrix with fewer factors, if it has some twice. Minima of -8 times the scales are
    those that 4-bit values without minima have. Groups of 32 with equal factors become groups of
    128. Symmetric GPTQ matrices have both.
    """
    scales, minima = weight.scales, weight.minima
    if weight.bits != 4 or weight.group != RUN:
        return weight
    if minima is not None and torch.equal(minima.float(), -8 * scales.float()):
        minima = None
    factors = [each for each in (scales, minima) if each is not None]
    count, outputs = BLOCK_COLUMNS // RUN, len(scales)
    if scales.shape[1] % count or not all(_repeats(each, count) for each in factors):
        return GroupedWeight(weight.values, scales, minima, 4, RUN)
    scales, *rest = (each.view(outputs, -1, count)[:, :, 0].contiguous() for each in factors)
    return GroupedWeight(weight.values, scales, rest[0] if rest else None, 4, BLOCK_COLUMNS)


def _repeats(factors: Tensor, count: int) -> bool:
    """Whether each `count` neighbours are equal."""
    runs = factors.view(len(factors), -1, count)
    return torch.equal(runs[:, :, 1:], runs[:, :, :1].expand(-1, -1, count - 1))


def tiled(weight: GroupedWeight) -> GroupedWeight:
    """Puts 16 rows and 128 columns, a block, next to each other in memory. The blocks of the same
    rows follow each other. Within a row of a block, the order of pieces of 16 bytes depends on the
    row, so that threads which read the same piece of several rows use all banks of shared memory.
    """
    assert not weight.is_tiled
    return _reordered(weight)


def untiled(weight: GroupedWeight) -> GroupedWeight:
    """The inverse of `tiled`."""
    assert weight.is_tiled
    return _reordered(weight)


def _reordered(weight: GroupedWeight) -> GroupedWeight:
    """Tiles a matrix, or undoes it. Both exchange the rows of tiles and their blocks."""
    outputs, size = weight.shape
    sides = [TILE_ROWS, size // BLOCK_COLUMNS]
    if weight.is_tiled:
        sides.reverse()

    def exchanged(tensor: Tensor) -> Tensor:
        parts = tensor.view(outputs // TILE_ROWS, *sides, -1)
        return parts.transpose(1, 2).reshape(tensor.shape)

    if weight.is_tiled:
        values = exchanged(_swizzled(weight.values, weight.bits))
    else:
        values = _swizzled(exchanged(weight.values), weight.bits)
    scales, minima = exchanged(weight.scales), weight.minima
    minima = None if minima is None else exchanged(minima)
    return GroupedWeight(values, scales, minima, weight.bits, weight.group, not weight.is_tiled)


def _swizzled(tiles: Tensor, bits: int) -> Tensor:
    """Exchanges the pieces of each row of a block. Twice, it changes nothing."""
    pieces = BLOCK_COLUMNS * bits // 8 // PIECE
    rows = tiles.view(-1, TILE_ROWS, pieces, PIECE)
    row = torch.arange(TILE_ROWS, device=tiles.device)[:, None]
    key = row // 2 % 4 if bits == 4 else row % 8
    return rows[:, row, torch.arange(pieces, device=tiles.device) ^ key].view(tiles.shape)


def grouped_linear(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    fusion: Fusion = PLAIN,
    out: Tensor | None = None,
) -> Tensor:
    """residual + act(rms_norm(x) W^T + bias), as `fused_linear`, but with quantized W. The result
    is written to `out`, if it is given.
    """
    if hopper.suits(x, weight, fusion):
        if out is None:
            outputs = weight.shape[0] // (1 if fusion.gate is None else 2)
            out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
        hopper.grouped_linear(x, weight, bias, fusion, out)
        return out
    y = _composed(x, weight, bias, fusion)
    return y if out is None else out.copy_(y)


def _composed(x: Tensor, weight: GroupedWeight, bias: Tensor | None, fusion: Fusion) -> Tensor:
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
    if weight.is_tiled:
        weight = untiled(weight)
    values, scales, minima = (
        each if each is None or rows is None else each[rows]
        for each in (weight.values, weight.scales, weight.minima)
    )
    assert values is not None and scales is not None
    if weight.bits == 4:
        runs = values.unflatten(1, (-1, weight.run // 2))
        values = torch.cat((runs & 15, runs >> 4), dim=-1).flatten(1)
    groups = values.unflatten(1, (scales.shape[1], -1))  # (R, D / group, values)
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
