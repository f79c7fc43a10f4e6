"""RoPE for queries and keys. The same kernel also writes keys and values to the cache."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.torch.kernels.base import Example, Inputs, Shape, op, size_of
from engine.torch.kernels.fp8 import FP8, write_cache


@op("rope:rope_write")
def rope_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_table: Tensor,
    write_slots: Tensor,
    cache_layer: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Applies RoPE: qkv (T, (N + 2 K) H) -> rotated queries (T, N, H). Writes the rotated keys, and
    the values, to the slots `write_slots` (T,) of the cache.

    `cos_sin_table` is float32 (max_positions, dim): dim / 2 cosines, then dim / 2 sines. The first
    `dim` values of a head are rotated. Value i and value i + dim / 2 form a pair. `cache_layer` is
    (num_blocks, block_size, 2, K, H) with stride 1 in the last dimension. `q_norm` and `k_norm` are
    the weights (H,) of RMS norms that apply to each head before the rotation.
    """
    parts = qkv.unflatten(-1, (heads + 2 * kv_heads, head_dim)).float()
    q, k, v = parts.split((heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q = F.rms_norm(q, q_norm.shape, q_norm.float(), eps)
        k = F.rms_norm(k, k_norm.shape, k_norm.float(), eps)
    cos, sin = cos_sin_table[positions.long()][:, None].chunk(2, dim=-1)  # (T, 1, dim / 2)
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    block_size = cache_layer.shape[1]
    written = torch.stack((k, v), dim=1)  # (T, 2, K, H)
    if cache_layer.dtype == FP8:
        write_cache(cache_layer.flatten(0, 1), write_slots.long(), written)
    else:
        places = write_slots // block_size, write_slots % block_size
        cache_layer[places] = written.to(cache_layer.dtype)
    return q.to(qkv.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(turned, dim=-1)


def _examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    max_positions = max(shape.context, max(shape.rows))
    # The first examples rotate whole heads. The others rotate half of each head and apply norms.
    for dim, with_norms in ((head_dim, False), (head_dim // 2, True)):
        angles = inputs.uniform(max_positions, dim // 2) * 6.28
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        norms = [inputs.normal(head_dim) for _ in range(2)] if with_norms else [None, None]
        for rows in shape.rows:
            num_blocks = -(-rows // shape.block_size) + 2
            cache = inputs.normal(num_blocks, shape.block_size, 2, kv_heads, head_dim)
            args = (
                inputs.normal(rows, shape.qkv_size),
                inputs.integers(max_positions, rows),
                table,
                inputs.permutation(num_blocks * shape.block_size)[:rows],
                cache,
                heads,
                kv_heads,
                head_dim,
                *norms,
                1e-6,
            )
            label = f"{rows}x({heads}+2*{kv_heads})x{head_dim}{' normed' if with_norms else ''}"
            yield Example(label, args)


rope_write.specify(
    _examples,
    lambda qkv, positions, table, *_: size_of(qkv, qkv) + 4 * len(qkv) * len(table[0]),
)
