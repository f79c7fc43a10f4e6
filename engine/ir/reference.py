"""The numpy float32 reference of each op. Tests compare all kernels with these functions.

Letters: T tokens, D hidden size, N heads, K KV heads, H head size, L sequence length,
C blocks of the cache, P block size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.ir.plan import Routing

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Integers = NDArray[np.int32] | NDArray[np.int64]


def _f32(values: NDArray[Any]) -> F32:
    return values.astype(np.float32)


def embed(table: F32, token_ids: I32) -> F32:
    """Looks up table rows: (V, D), (T,) -> (T, D)."""
    return table[token_ids]


def linear(x: F32, weight: F32, bias: F32 | None = None) -> F32:
    """x @ weight.T + bias: (T, in), (out, in), (out,) -> (T, out)."""
    matmul: F32 = x @ weight.T
    return matmul if bias is None else matmul + bias


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    return _f32(x / np.sqrt(mean + eps)) * weight


def layer_norm(x: F32, weight: F32, bias: F32 | None, eps: float) -> F32:
    centred = x - x.mean(axis=-1, keepdims=True, dtype=np.float64)
    variance = np.mean(np.square(centred), axis=-1, keepdims=True)
    scaled = _f32(centred / np.sqrt(variance + eps)) * weight
    return scaled if bias is None else scaled + bias


def rope(x: F32, cosines: F32, sines: F32) -> F32:
    """Rotates values i and i + dim / 2 of each head of x (T, N, H), for i < dim / 2. Copies the
    remaining values of the head.

    Cosines and sines are (T, dim / 2).
    """
    half = cosines.shape[1]
    first, second, rest = np.split(x, (half, 2 * half), axis=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    turned = (first * cosines - second * sines, second * cosines + first * sines, rest)
    return np.concatenate(turned, axis=-1)


def silu(x: F32) -> F32:
    with np.errstate(over="ignore"):
        return _f32(x / (1 + np.exp(-x.astype(np.float64))))


def gelu(x: F32) -> F32:
    wide = x.astype(np.float64).ravel()
    erf = np.fromiter((math.erf(value / math.sqrt(2)) for value in wide), np.float64, wide.size)
    return (0.5 * wide * (1 + erf)).reshape(x.shape).astype(np.float32)


def gelu_tanh(x: F32) -> F32:
    wide = x.astype(np.float64)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return _f32(0.5 * wide * (1 + np.tanh(inner)))


def relu2(x: F32) -> F32:
    return np.square(np.maximum(x, 0))


def softcap(x: F32, cap: float) -> F32:
    return _f32(cap * np.tanh(x.astype(np.float64) / cap))


def sigmoid(x: F32) -> F32:
    with np.errstate(over="ignore"):
        return _f32(1 / (1 + np.exp(-x.astype(np.float64))))


def swiglu_oai(gate: F32, up: F32) -> F32:
    """The gate of gpt-oss: both factors are clamped, and 1 is added to the second."""
    gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
    return gate * sigmoid(np.float32(1.702) * gate) * (up + 1)


def alibi_slopes(heads: int, largest_exponent: float) -> F32:
    """The slope of each head, as MPT has them. Heads beyond a power of two take every second slope
    of the next power of two.
    """
    count = 2 ** math.ceil(math.log2(heads))
    exponents = np.arange(1, count + 1, dtype=np.float32) * np.float32(largest_exponent / count)
    slopes: F32 = np.float32(1) / np.float32(2) ** exponents
    return slopes if count == heads else np.concatenate((slopes[1::2], slopes[::2]))[:heads]


class ScoreRules(msgspec.Struct, frozen=True):
    """What attention does to scores, besides scaling them and masking later positions."""

    softcap: float | None = None
    slopes: F32 | None = None  # (N,) ALiBi: slope * distance is subtracted
    sinks: F32 | None = None  # (N,) a logit that only adds to softmax's sum
    centered: bool = False  # a window reaches as far after the token as before it


PLAIN = ScoreRules()


def attention(
    q: F32,
    k: F32,
    v: F32,
    positions: I32,
    scale: float,
    window: int | None = None,
    rules: ScoreRules = PLAIN,
    visible_end: I32 | None = None,
) -> F32:
    """Attention of one sequence: queries (T, N, H), keys (L, K, H), values (L, K, U) -> (T, N, U).
    U is H unless the values are a part of the keys.

    `positions` (T,) are the positions of the queries. A query attends to the keys up to its own
    position, or to those before `visible_end` (T,). If there is a `window`, it attends only to the
    last `window` keys up to its own position, and if the window is centered, to as many after it.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("tnh,lnh->ntl", q, keys, dtype=np.float64) * scale
    if rules.softcap is not None:
        scores = rules.softcap * np.tanh(scores / rules.softcap)
    at = np.arange(len(k))
    if rules.slopes is not None:
        scores = scores - rules.slopes[:, None, None] * (positions[:, None] - at)
    end = positions + 1 if visible_end is None else visible_end
    if window is not None and rules.centered:
        end = np.minimum(end, positions + window)
    seen = at < end[:, None]
    if window is not None:
        seen &= at > positions[:, None] - window
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    sinks = np.full((1, 1, 1), -np.inf) if rules.sinks is None else rules.sinks[:, None, None]
    top = np.maximum(top, sinks)
    weights = np.exp(scores - top)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks - top)
    return _f32(np.einsum("ntl,lnh->tnh", weights, values))


ACTIVATIONS: dict[str, Callable[[F32], F32]] = {
    "none": lambda x: x,
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
}


def head_norm(x: F32, weight: F32, eps: float, head_dim: int) -> F32:
    """Normalizes each head with an RMS norm: (T, N * H), weight (H,) -> (T, N * H)."""
    return rms_norm(x.reshape(-1, head_dim), weight, eps).reshape(x.shape)


def rope_rows(x: F32, cosines: F32, sines: F32, head_dim: int) -> F32:
    """`rope` for heads that are stored as (T, N * H)."""
    return rope(x.reshape(len(x), -1, head_dim), cosines, sines).reshape(x.shape)


def kv_write(cache: F32, keys: F32, values: F32, slots: Integers) -> F32:
    """Writes keys and values (T, K * H) into the cache (C, P, 2, K, H), in place.

    `slots` (T,) says where each token goes: block * P + offset in the block.
    """
    kv_heads, head_dim = cache.shape[3:]
    blocks, offsets = np.divmod(slots, cache.shape[1])
    cache[blocks, offsets, 0] = keys.reshape(-1, kv_heads, head_dim)
    cache[blocks, offsets, 1] = values.reshape(-1, kv_heads, head_dim)
    return cache


def paged_attention(
    q: F32,
    cache: F32,
    positions: I32,
    row_of: I32,
    tables: I32,
    scale: float,
    window: int | None = None,
    rules: ScoreRules = PLAIN,
    visible_end: I32 | None = None,
    latent: int = 0,
) -> F32:
    """Attention of queries (T, N * H) over the paged KV cache -> (T, N * H). The queries may belong
    to several sequences.

    Token t belongs to sequence row_of[t], whose block table is tables[row_of[t]]. It attends to
    the positions below visible_end[t]; None: to those up to its own. If `latent` is above 0, the
    cache has keys only, and the first `latent` values of a key are its value.
    """
    parts, kv_heads, head_dim = cache.shape[2:]
    heads = q.reshape(len(q), -1, head_dim)
    out = np.empty((*heads.shape[:2], latent or head_dim), np.float32)
    ends = positions + 1 if visible_end is None else visible_end
    for row in np.unique(row_of):
        tokens = np.flatnonzero(row_of == row)
        length = int(ends[tokens].max())
        blocks = tables[row, : -(-length // cache.shape[1])]
        known = cache[blocks].reshape(-1, parts, kv_heads, head_dim)[:length]
        values = known[:, -1, :, : out.shape[2]]
        out[tokens] = attention(
            heads[tokens],
            known[:, 0],
            values,
            positions[tokens],
            scale,
            window,
            rules,
            ends[tokens],
        )
    return out.reshape(len(q), -1)


def head_linear(x: F32, matrices: F32, rotations: tuple[F32, F32] | None = None) -> F32:
    """Multiplies each head of x (T, N * I) by its own matrix of (N, O, I) -> (T, N * O). With
    rotations, the last values of each head are rotated instead and follow the results.
    """
    heads = x.reshape(len(x), len(matrices), -1)
    size = matrices.shape[2]
    results: F32 = np.einsum("tni,noi->tno", heads[..., :size], matrices)
    if rotations is not None:
        results = np.concatenate((results, rope(heads[..., size:], *rotations)), axis=-1)
    return results.reshape(len(x), -1)


def latent_write(
    x: F32, norm: F32, eps: float, rotations: tuple[F32, F32], cache: F32, slots: Integers
) -> F32:
    """Normalizes the latents in the first columns of x, rotates the keys in the other columns, and
    writes both into the cache (C, P, 1, 1, H), in place.
    """
    rank = len(norm)
    keys = rope(x[:, None, rank:], *rotations)[:, 0]
    blocks, offsets = np.divmod(slots, cache.shape[1])
    cache[blocks, offsets, 0, 0] = np.concatenate((rms_norm(x[:, :rank], norm, eps), keys), axis=1)
    return cache


def mean_rows(x: F32, last: Integers) -> F32:
    """Row i is the mean of the rows of x (T, D) after last[i - 1], up to last[i]: -> (R, D)."""
    starts = np.concatenate(([0], last[:-1] + 1))
    sums = np.add.reduceat(x.astype(np.float64), starts, axis=0)
    return _f32(sums / (last - starts + 1)[:, None])


def gated_product(activation: str, gate: F32, up: F32) -> F32:
    return (
        swiglu_oai(gate, up) if activation == "swiglu_oai" else ACTIVATIONS[activation](gate) * up
    )


def projection(
    x: F32, parts: Sequence[F32], biases: Sequence[F32], activation: str, gated: bool
) -> F32:
    """Multiplies x by several matrices, concatenates the results and applies the activation.

    If `gated`, there are two matrices, and the result is activation(first) * second.
    """
    matmuls = [
        linear(x, part, biases[index] if biases else None) for index, part in enumerate(parts)
    ]
    if gated:
        return gated_product(activation, *matmuls)
    return ACTIVATIONS[activation](np.concatenate(matmuls, axis=1))


def rope_write(
    qkv: F32,
    heads: int,
    cache: F32,
    slots: Integers,
    rotations: tuple[F32, F32] | None,
    norms: tuple[F32 | None, F32 | None],
    eps: float,
) -> F32:
    """Normalizes and rotates q and k, writes k and v to the cache, and returns the new qkv.

    `norms` are the weights of the norms of q and k. `rotations` are the cosines and sines at the
    positions of the tokens. None means no norm, or no rotation.
    """
    kv_heads, head_dim = cache.shape[3:]
    middle, last = heads * head_dim, (heads + kv_heads) * head_dim
    turned = []
    for x, norm in zip((qkv[:, :middle], qkv[:, middle:last]), norms, strict=True):
        if norm is not None:  # the norm covers one head, or all heads together
            x = head_norm(x, norm, eps, len(norm))
        turned.append(x if rotations is None else rope_rows(x, *rotations, head_dim))
    kv_write(cache, turned[1], qkv[:, last:], slots)
    return np.concatenate((*turned, qkv[:, last:]), axis=1)


def route(logits: F32, routing: Routing, correction: F32 | None = None) -> F32:
    """Logits (T, E) -> the weight of each expert for each token (T, E), 0 for those not chosen."""
    wide = logits.astype(np.float64)
    if routing.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-wide))
    else:
        powers = np.exp(wide - wide.max(axis=1, keepdims=True))
        scores = powers if routing.scoring == "softmax_chosen" else _share(powers)
    ranks = wide if routing.scoring == "softmax_chosen" else scores
    ranks = ranks if correction is None else ranks + correction
    chosen = np.zeros(logits.shape, bool)
    places = np.argsort(-_within_groups(ranks, routing), axis=1, kind="stable")
    np.put_along_axis(chosen, places[:, : routing.per_token], True, axis=1)
    weights = np.where(chosen, scores, 0)
    if routing.renormalizes or routing.scoring == "softmax_chosen":
        weights = _share(weights)
    return _f32(weights * routing.scale)


def _share(values: NDArray[np.float64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = values / values.sum(axis=1, keepdims=True)
    return shares


def _within_groups(ranks: NDArray[np.float64], routing: Routing) -> NDArray[np.float64]:
    """The ranks, with minus infinity for the experts outside a token's best groups."""
    if routing.groups == 1:
        return ranks
    groups = ranks.reshape(len(ranks), routing.groups, -1)
    best = np.sort(groups, axis=2)[..., -1 if routing.group_score == "best" else -2 :]
    places = np.argsort(-best.sum(axis=2), axis=1, kind="stable")[:, : routing.groups_per_token]
    kept = np.zeros(groups.shape[:2], bool)
    np.put_along_axis(kept, places, True, axis=1)
    return np.where(kept[..., None], groups, -np.inf).reshape(ranks.shape)


def experts(
    x: F32, weights: F32, matrices: Sequence[F32], biases: Sequence[F32], activation: str
) -> F32:
    """Rows (T, D) and routing weights (T, E) -> the weighted sum of the experts' results (T, D).

    `matrices` are gate and up (E, X, D) and down (E, D, X). `biases` has theirs, or is empty.
    """
    out = np.zeros_like(x)
    for expert in range(weights.shape[1]):
        tokens = np.flatnonzero(weights[:, expert])
        gate, up, down = (matrix[expert] for matrix in matrices)
        of_gate, of_up, of_down = (bias[expert] for bias in biases) if biases else (None,) * 3
        rows = x[tokens]
        inner = gated_product(activation, linear(rows, gate, of_gate), linear(rows, up, of_up))
        out[tokens] += weights[tokens, expert, None] * linear(inner, down, of_down)
    return out
