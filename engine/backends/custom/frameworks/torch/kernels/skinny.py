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

from engine.backends.custom.frameworks.torch.kernels.activation import gated, gated_halves
from engine.backends.custom.frameworks.torch.kernels.base import (
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
from engine.backends.custom.frameworks.torch.kernels.gated_linear import gated_linear
from engine.backends.custom.frameworks.torch.kernels.norm import rms_norm

MAX_ROWS = 16
# A single row always uses the fused kernel. For more rows, the choice was measured on an H200. If
# the input has at least _WIDE columns, the fused kernel is faster for the numbers of rows in _FEW.
# Otherwise cuBLAS is faster, although it takes more launches.
_WIDE, _FEW = 4096, range(5, MAX_ROWS + 1)
# Max rows for which float8 weights use the fused kernel. With more rows, the weights are converted
# for cuBLAS.
MAX_SCALED_ROWS = 128


def is_few(x: Tensor) -> bool:
    """Whether x (T, D) has so few rows that its matmuls use the fused kernel, which includes the
    norm and the epilogue.
    """
    rows, size = x.shape
    return use_triton(x) and (rows == 1 or (size >= _WIDE and rows in _FEW))


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias for up to MAX_ROWS rows: x (T, D), weight (F, D) -> (T, F)."""
    return _SKINNY_LINEAR(x, weight, bias)


def fused_linear(
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
    """residual + act(rms_norm(x) W^T + bias), for any number of rows. A part whose argument is None
    is skipped.

    `norm` is the weight of the RMS norm. `gate` names the activation of a gated MLP. With a gate, W
    has the rows of gate, followed by the rows of up. `scale` (F,) float32 is given only for float8
    weights. It has one scale per output channel.
    """
    parts: dict[str, Any] = {
        "scale": scale,
        "norm": norm,
        "eps": eps,
        "gate": gate,
        "residual": residual,
    }
    if is_few(x) or (scale is not None and len(x) <= MAX_SCALED_ROWS and use_triton(x)):
        return _SKINNY_LINEAR(x, weight, bias, **parts)
    return _composed(x, weight, bias, **parts)


def _composed(
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
        x = rms_norm(x, norm, eps)
    if scale is None and gate is not None:
        y = gated_linear(x, weight, bias, gate)
    elif scale is None:
        y = F.linear(x, weight, bias)
    else:
        y = (F.linear(x, weight.to(x.dtype)) * scale).to(x.dtype)
        y = y if bias is None else y + bias
        y = y if gate is None else gated(y, gate)
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
    for rows in (each for each in shape.rows if each <= MAX_SCALED_ROWS):
        stream = inputs.normal(rows, hidden)
        scale = inputs.uniform(len(qkv)) * 0.01
        in_8_bits = (qkv.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        yield Example(f"qkv fp8 {rows}", (stream, in_8_bits), {**normed, "scale": scale})
        if rows > MAX_ROWS:
            continue
        attended, activated = inputs.normal(rows, heads), inputs.normal(rows, inner)
        yield Example(f"qkv {rows}", (stream, qkv, bias), normed)
        yield Example(f"o {rows}", (attended, o), {"residual": stream})
        yield Example(f"gate_up {rows}", (stream, gate_up), {**normed, "gate": "silu"})
        yield Example(f"down {rows}", (activated, down), {"residual": stream})
        yield Example(f"head {rows}", (stream, head), normed)


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
