"""Skinny GEMM: a matmul with few input rows (tokens). It takes as long as reading the weights.

The norm before the matmul, and the gated activation and residual addition after it, are fused into
the same kernel. So a layer at batch 1 takes only a few kernel launches. With more rows, norm,
matmul, activation and addition are separate kernels. The matmul is then done by cuBLAS.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.torch.kernels.activation import gated, gated_halves
from engine.torch.kernels.base import SUMMED, Example, Inputs, Shape, op, size_of, use_triton
from engine.torch.kernels.gated_linear import gated_linear
from engine.torch.kernels.norm import rms_norm

MAX_ROWS = 16
# A single row always uses the fused kernel. For more rows, the choice was measured on an H200. If
# the input has at least _WIDE columns, the fused kernel is faster for the numbers of rows in _FEW.
# Otherwise cuBLAS is faster, although it takes more launches.
_WIDE, _FEW = 4096, range(5, MAX_ROWS + 1)


def is_few(x: Tensor) -> bool:
    """Whether x (T, D) has so few rows that its matmuls use the fused kernel, which includes the
    norm and the epilogue.
    """
    rows, size = x.shape
    return use_triton(x) and (rows == 1 or (size >= _WIDE and rows in _FEW))


class Fusion(NamedTuple):
    """What a matmul's kernel computes besides: an RMS norm of the input before it, and a gated
    activation and the addition of a residual after it. A part that is None is skipped.
    """

    norm: Tensor | None = None  # the weight of the norm
    eps: float = 0.0
    gate: str | None = None  # the activation; W has the rows of gate, followed by those of up
    residual: Tensor | None = None

    def finished(self, y: Tensor, gate: Callable[[Tensor, str], Tensor] = gated) -> Tensor:
        """What follows after the matmul. `gate` computes the activation."""
        if self.gate is not None:
            y = gate(y, self.gate)
        return y if self.residual is None else self.residual + y


PLAIN = Fusion()


def fused_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN
) -> Tensor:
    """residual + act(rms_norm(x) W^T + bias), for any number of rows."""
    if is_few(x):
        return skinny_linear(x, weight, bias, fusion)
    if fusion.norm is not None:
        x = rms_norm(x, fusion.norm, fusion.eps)
    gate = fusion.gate
    y = F.linear(x, weight, bias) if gate is None else gated_linear(x, weight, bias, gate)
    return y if fusion.residual is None else fusion.residual + y


@op("skinny:skinny_linear")
def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, fusion: Fusion, scale: Tensor | None = None
) -> Tensor:
    """As `fused_linear`, for few rows. A single row may have float8 weights. `scale` (F,) float32
    then has one scale per output channel.
    """
    if fusion.norm is not None:
        x = F.rms_norm(x, fusion.norm.shape, fusion.norm, fusion.eps)
    return fusion.finished(F.linear(x, _dense(weight, scale, x.dtype), bias), gated_halves)


def _dense(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return weight if scale is None else (weight.float() * scale[:, None]).to(dtype)


def _examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    hidden, inner, heads = shape.hidden_size, shape.inner_size, shape.num_heads * shape.head_dim
    normed = Fusion(inputs.normal(hidden), 1e-5)

    def weight(outputs: int, size: int) -> Tensor:
        return inputs.normal(outputs, size, scale=size**-0.5)

    qkv, o = weight(shape.qkv_size, hidden), weight(hidden, heads)
    gate_up, down = weight(2 * inner, hidden), weight(hidden, inner)
    head, bias = weight(shape.vocab_size, hidden), inputs.normal(shape.qkv_size)
    for rows in (each for each in shape.rows if each <= MAX_ROWS):
        stream = inputs.normal(rows, hidden)
        if rows == 1:
            yield from _fp8_examples(stream, qkv, down, normed, inputs)
        attended, activated = inputs.normal(rows, heads), inputs.normal(rows, inner)
        added = Fusion(residual=stream)
        yield Example(f"qkv {rows}", (stream, qkv, bias, normed))
        yield Example(f"o {rows}", (attended, o, None, added))
        yield Example(f"gate_up {rows}", (stream, gate_up, None, normed._replace(gate="silu")))
        yield Example(f"down {rows}", (activated, down, None, added))
        yield Example(f"head {rows}", (stream, head, None, normed))


def _fp8_examples(
    stream: Tensor, qkv: Tensor, down: Tensor, normed: Fusion, inputs: Inputs
) -> Iterator[Example]:
    for name, weight in (("qkv", qkv), ("down", down)):
        scale = (inputs.uniform(len(weight)) + 0.5) * 0.01
        in_8_bits = (weight.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        if name == "qkv":
            yield Example("qkv fp8", (stream, in_8_bits, None, normed, scale))
        else:
            inside, added = inputs.normal(1, weight.shape[1]), Fusion(residual=stream)
            yield Example("down fp8", (inside, in_8_bits, None, added, scale))


def _bytes(
    x: Tensor, weight: Tensor, bias: Tensor | None, fusion: Fusion, scale: Tensor | None = None
) -> int:
    written = len(x) * len(weight) // (2 if fusion.gate else 1) * x.element_size()
    return size_of(x, weight, bias, fusion.residual, scale) + written


skinny_linear.specify(
    _examples,
    _bytes,
    flops_of=lambda x, weight, *_: 2 * len(x) * weight.numel(),
    tolerance=SUMMED,
)
