"""Matmuls with weights and activations in float8 (e4m3). A weight matrix has one scale per output
channel. Activations are quantized as the model runs, with one scale per token.

The quantization is fused into the kernel before the matmul: an RMSNorm, a gated activation, or a
plain copy. A single token is not quantized: its matmul takes as long as reading the weights.

The KV cache can have float8 keys and values too, with a scale per token and head. The bytes of a
cache slot are those of keys and values, and then the scales as float32 numbers.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runtime.model_runner import I32, BatchInputs
from engine.torch import device as gpu
from engine.torch.kernels.activation import GATES, gated_halves
from engine.torch.kernels.base import (
    SUMMED,
    Example,
    Inputs,
    Shape,
    Tolerance,
    interpreting,
    op,
    size_of,
    use_triton,
)
from engine.torch.kernels.skinny import PLAIN, Fusion, skinny_linear

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
MAX_DENSE_KEYS = 65536  # max keys of a layer that are dequantized for prefill
SMALLEST_SCALE = 1e-12  # keeps rows of zeros from a division by zero
# Our kernel is faster than cuBLASLt for up to this many tokens, if the matrix has at most so many
# rows; measured on an H200. For other matrices, it is faster for up to _FEW tokens.
_SEVERAL, _FEW = {4096: 256, 8192: 128}, 64
_ALIGNED = 16  # cuBLASLt takes float8 matrices whose sizes are multiples of this


class QuantizedRows(NamedTuple):
    """Activations in float8. A value is values[t, d] * scales[t, 0]."""

    values: Tensor  # float8 (T, D)
    scales: Tensor  # float32 (T, 1)


def has_fp8(device: torch.device) -> bool:
    """Whether Triton has float8 on the device."""
    return gpu.has_fp8(device) if device.type == "cuda" else interpreting()


def _has_kernels(x: Tensor) -> bool:
    return has_fp8(x.device) and use_triton(x)


@op("fp8:quantize_rows", suits=_has_kernels)
def quantize_rows(x: Tensor) -> QuantizedRows:
    """Quantizes x (T, D). The largest absolute value of a row becomes 448."""
    return _quantized(x)


@op("fp8:rms_norm_rows", suits=_has_kernels)
def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> QuantizedRows:
    """Quantizes rms_norm(x)."""
    return _quantized(F.rms_norm(x.float(), weight.shape, weight.float(), eps))


@op("fp8:add_rms_norm_rows", suits=_has_kernels)
def add_rms_norm_rows(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    """Quantizes rms_norm(x + residual). Also returns the sum, which is the new residual stream."""
    total = x + residual
    return rms_norm_rows.reference(total, weight, eps), total


@op("fp8:gated_rows", suits=_has_kernels)
def gated_rows(gate_up: Tensor, kind: str) -> QuantizedRows:
    """Quantizes activation(gate) * up, for gate and up side by side: (T, 2 I) -> (T, I)"""
    return _quantized(gated_halves(gate_up.float(), kind))


def scaled_linear(
    rows: QuantizedRows,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    invariant: bool = False,
) -> Tensor:
    """x W^T + bias in `dtype`, for float8 x (T, D) and W (F, D). `scale` (F,) has the scales of the
    output channels. With `invariant`, one kernel computes any number of rows. Its tile sizes depend
    on that number, but the order of its sums does not.
    """
    values, scales = rows
    if not invariant and _suits_library(values, weight, dtype):
        y = torch._scaled_mm(
            values, weight.t(), scales, scale[None], out_dtype=dtype, use_fast_accum=True
        )
        return y if bias is None else y + bias
    return _scaled_linear(values, scales, weight, scale, bias, dtype)


@op("fp8:scaled_linear", suits=_has_kernels)
def _scaled_linear(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    # Float8 numbers are exact in all wider types, and so are their products in float32.
    y = F.linear(values.to(dtype), weight.to(dtype)).float() * scales * scale
    return (y if bias is None else y + bias.float()).to(dtype)


def fp8_linear(
    x: Tensor | QuantizedRows,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fusion: Fusion = PLAIN,
    invariant: bool = False,
) -> Tensor:
    """residual + act(rms_norm(x) W^T + bias), as `fused_linear`, with float8 W. x is quantized if
    it is not yet, and if it has several rows. With `invariant`, a single row is quantized too.
    """
    if isinstance(x, Tensor) and len(x) == 1 and has_fp8(x.device) and not invariant:
        return skinny_linear(x, weight, bias, fusion, scale)
    if isinstance(x, Tensor):
        norm = fusion.norm
        x = quantize_rows(x) if norm is None else rms_norm_rows(x, norm, fusion.eps)
    return fusion.finished(scaled_linear(x, weight, scale, bias, dtype, invariant))


def cache_slot_bytes(num_vectors: int, head_dim: int) -> int:
    """Bytes of a slot with this many keys and values, rounded up for aligned reads."""
    return -(-num_vectors * (head_dim + 4) // _ALIGNED) * _ALIGNED


def cache_scales(cache: Tensor) -> Tensor:
    """The scales (.., 2, K) of a float8 cache (.., 2, K, H), as a view of the same memory."""
    assert cache.dtype == FP8, cache.dtype
    start = cache.storage_offset() + cache.shape[-3] * cache.stride(-3)
    strides = [stride // 4 for stride in cache.stride()[:-3]]
    return torch.empty(0, dtype=torch.float32, device=cache.device).set_(
        cache.untyped_storage(), start // 4, cache.shape[:-1], (*strides, cache.shape[-2], 1)
    )


def read_cache(cache: Tensor, dtype: torch.dtype, *places: Tensor) -> Tensor:
    """cache[places] in `dtype`, dequantized if the cache is in float8."""
    values = cache[places]
    if cache.dtype != FP8:
        return values
    return (values.float() * cache_scales(cache)[places][..., None]).to(dtype)


def write_cache(cache: Tensor, slots: Tensor, vectors: Tensor) -> None:
    """Quantizes keys and values (T, 2, K, H) and writes them to the slots (T,) of a float8 cache
    (slots, 2, K, H).
    """
    values, scales = _quantized(vectors.flatten(0, -2))
    cache[slots] = values.view(vectors.shape)
    cache_scales(cache[:, None])[slots, 0] = scales.view(vectors.shape[:-1])


@op("fp8:dense_blocks", suits=_has_kernels)
def dense_blocks(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantizes the blocks (M,) of a float8 cache: (M, block size, 2, K, H)"""
    return read_cache(cache, dtype, blocks.long())


def dense_tables(inputs: BatchInputs, block_size: int) -> dict[str, I32]:
    """What the Hopper kernel needs to read a float8 cache: the blocks of all rows with several
    queries, which are dequantized, and block tables that name the results. It is empty if there
    would be too many keys. Then the Triton kernel reads the float8 cache.
    """
    chunks = np.flatnonzero(np.diff(inputs.query_start) > 1)
    widths = -(-inputs.seq_lens[chunks] // block_size)
    if inputs.window_tables is not None or widths.sum() * block_size > MAX_DENSE_KEYS:
        return {}
    tables = np.zeros_like(inputs.block_tables)
    filled = np.arange(tables.shape[1]) < widths[:, None]  # (chunks, table width)
    numbered = np.zeros_like(filled, np.int32)
    numbered[filled] = np.arange(widths.sum())
    tables[chunks] = numbered
    return {"dense_blocks": inputs.block_tables[chunks][filled], "dense_tables": tables}


def _suits_library(values: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether cuBLASLt has the matmul and is the fastest."""
    outputs, size = weight.shape
    few = next((count for rows, count in _SEVERAL.items() if outputs <= rows), _FEW)
    return (
        len(values) > few
        and values.is_cuda
        and gpu.has_scaled_gemm(values.device)
        and dtype == torch.bfloat16  # the only type of its results with a scale per row
        and outputs % _ALIGNED == 0
        and size % _ALIGNED == 0
    )


def _quantized(x: Tensor) -> QuantizedRows:
    x = x.float()
    scales = x.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST_SCALE * LARGEST) / LARGEST
    return QuantizedRows((x / scales).to(FP8), scales)


def _row_examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    for rows in shape.rows:
        yield Example(f"{rows}x{shape.hidden_size}", (inputs.normal(rows, shape.hidden_size),))


def _norm_examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    weight = Inputs(device, dtype, seed=1).normal(shape.hidden_size)
    for example in _row_examples(shape, device, dtype):
        yield Example(example.label, (*example.args, weight, 1e-5))


def _add_examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype, seed=2)
    for example in _norm_examples(shape, device, dtype):
        x, *rest = example.args
        yield Example(example.label, (x, inputs.normal(*x.shape), *rest))


def _gated_examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    for rows in shape.rows:
        for kind in GATES if shape.name == "tiny" else ("silu",):
            gate_up = inputs.normal(rows, 2 * shape.inner_size)
            yield Example(f"{kind} {rows}x{shape.inner_size}", (gate_up, kind))


def _linear_examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    hidden, inner, heads = shape.hidden_size, shape.inner_size, shape.num_heads * shape.head_dim
    matrices = {
        "qkv": (shape.qkv_size, hidden),
        "o": (hidden, heads),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    for name, (outputs, size) in matrices.items():
        weight = inputs.normal(outputs, size).to(FP8)
        scale = (inputs.uniform(outputs) + 0.1) * size**-0.5
        bias = inputs.normal(outputs) if name == "qkv" else None
        for rows in (each for each in shape.rows if each <= 256):
            x = _quantized(inputs.normal(rows, size))
            yield Example(f"{name} {rows}", (*x, weight, scale, bias, dtype))


def random_cache(inputs: Inputs, blocks: int, shape: Shape) -> Tensor:
    """A float8 cache with random keys and values, for examples."""
    size, heads, width = shape.block_size, shape.num_kv_heads, shape.head_dim
    slot = cache_slot_bytes(2 * heads, width)
    memory = torch.zeros(blocks * size, slot, dtype=torch.uint8, device=inputs.device)
    strides = (size * slot, slot, heads * width, width, 1)
    cache = memory.view(FP8).as_strided((blocks, size, 2, heads, width), strides)
    vectors = inputs.normal(blocks * size, 2, heads, width)
    write_cache(cache.flatten(0, 1), torch.arange(blocks * size, device=inputs.device), vectors)
    return cache


def _dense_examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    count = -(-max(shape.rows) // shape.block_size)
    cache = random_cache(inputs, count + 1, shape)
    yield Example(f"{count} blocks", (cache, inputs.permutation(count).int(), dtype))


def _rows_bytes(x: Tensor, *rest: Any) -> int:
    """For kernels that write as many values as x has."""
    return size_of(x, *(each for each in rest if isinstance(each, Tensor))) + x.numel()


# Rounded values may differ by one unit in the last place, which is an eighth of a power of two.
_ROUNDED = {
    dtype: Tolerance(0.13, 0.02) for dtype in (torch.float32, torch.float16, torch.bfloat16)
}
quantize_rows.specify(_row_examples, _rows_bytes, tolerance=_ROUNDED)
rms_norm_rows.specify(_norm_examples, _rows_bytes, tolerance=_ROUNDED)
add_rms_norm_rows.specify(
    _add_examples, lambda x, *rest: _rows_bytes(x, *rest) + size_of(x), tolerance=_ROUNDED
)
gated_rows.specify(
    _gated_examples,
    lambda gate_up, kind: size_of(gate_up) + gate_up.numel() // 2,
    tolerance=_ROUNDED,
)
_scaled_linear.specify(
    _linear_examples,
    lambda values, scales, weight, scale, bias, dtype: (
        size_of(values, scales, weight, scale, bias) + len(values) * len(weight) * dtype.itemsize
    ),
    # Tensor cores compute twice as many float8 FLOPs per second as the bfloat16 FLOPs of the
    # roofline.
    flops_of=lambda values, scales, weight, *_: len(values) * weight.numel(),
    # Hopper's tensor cores keep 14 bits of the sums of float8 products.
    tolerance={**SUMMED, torch.float32: Tolerance(1e-2, 1e-2)},
)
dense_blocks.specify(
    _dense_examples,
    lambda cache, blocks, dtype: len(blocks) * cache[0].numel() * (1 + dtype.itemsize),
)
