"""Skinny GEMM: a matmul with few input rows (tokens). It takes as long as reading the weights.

The norm before the matmul, and the gated activation and residual addition after it, are fused into
the same kernel. So a layer at batch 1 takes only a few kernel launches. With more rows, norm,
matmul, activation and addition are separate kernels. The matmul is then done by cuBLAS.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.torch.kernels.activation import gated_halves
from engine.torch.kernels.base import (
    Example,
    Inputs,
    KernelSpec,
    Shape,
    Tolerance,
    compiled,
    register,
    size_of,
    use_triton,
)
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


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: Tensor, **parts: Any
) -> Tensor:
    """As `fused_linear`, for a single row and float8 weights. `scale` (F,) float32 has one scale
    per output channel.
    """
    return _SKINNY_LINEAR(x, weight, bias, scale=scale, **parts)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + act(rms_norm(x) W^T + bias), for any number of rows. A part whose argument is None
    is skipped.

    `norm` is the weight of the RMS norm. `gate` names the activation of a gated MLP. With a gate, W
    has the rows of gate, followed by the rows of up.
    """
    parts: dict[str, Any] = {"norm": norm, "eps": eps, "gate": gate, "residual": residual}
    if is_few(x):
        return _SKINNY_LINEAR(x, weight, bias, **parts)
    return _composed(x, weight, bias, **parts)


def _composed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    if norm is not None:
        x = rms_norm(x, norm, eps)
    y = F.linear(x, weight, bias) if gate is None else gated_linear(x, weight, bias, gate)
    return y if residual is None else residual + y


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    if norm is not None:
        x = F.rms_norm(x, norm.shape, norm, eps)
    y = F.linear(x, _dense(weight, scale, x.dtype), bias)
    if gate is not None:
        y = gated_halves(y, gate)
    return y if residual is None else residual + y


def _dense(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return weight if scale is None else (weight.float() * scale[:, None]).to(dtype)


def _examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    hidden, inner, heads = shape.hidden_size, shape.inner_size, shape.num_heads * shape.head_dim
    normed = {"norm": inputs.normal(hidden), "eps": 1e-5}

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
        yield Example(f"qkv {rows}", (stream, qkv, bias), normed)
        yield Example(f"o {rows}", (attended, o), {"residual": stream})
        yield Example(f"gate_up {rows}", (stream, gate_up), {**normed, "gate": "silu"})
        yield Example(f"down {rows}", (activated, down), {"residual": stream})
        yield Example(f"head {rows}", (stream, head), normed)


def _fp8_examples(
    stream: Tensor, qkv: Tensor, down: Tensor, normed: dict[str, Any], inputs: Inputs
) -> Iterator[Example]:
    for name, weight in (("qkv", qkv), ("down", down)):
        scale = (inputs.uniform(len(weight)) + 0.5) * 0.01
        in_8_bits = (weight.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        if name == "qkv":
            yield Example("qkv fp8", (stream, in_8_bits), {**normed, "scale": scale})
        else:
            inside = inputs.normal(1, weight.shape[1])
            yield Example("down fp8", (inside, in_8_bits), {"residual": stream, "scale": scale})


def _bytes(x: Tensor, weight: Tensor, bias: Tensor | None = None, **parts: Any) -> int:
    outputs = len(weight) // (2 if parts.get("gate") else 1)
    written = len(x) * outputs * x.element_size()
    return size_of(x, weight, bias, parts.get("residual"), parts.get("scale")) + written


_SKINNY_LINEAR = register(
    KernelSpec(
        name="skinny_linear",
        reference=_reference,
        triton=compiled("skinny:skinny_linear"),
        examples=_examples,
        bytes_of=_bytes,
        flops_of=lambda x, weight, *_, **__: 2 * len(x) * weight.numel(),
        tolerance={
            torch.float32: Tolerance(1e-4, 1e-4),
            torch.float16: Tolerance(1e-2, 1e-2),
            torch.bfloat16: Tolerance(4e-2, 4e-2),
        },
    )
)
