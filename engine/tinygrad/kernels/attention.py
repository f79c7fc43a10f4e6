"""Attention over a paged cache, as four tinygrad kernels: scores, max, softmax weights, and the
weighted mean of the values. The loops over blocks end at the longest block table of the step.

In a block, the keys of consecutive positions are contiguous, and so are the values of consecutive
head dimensions. The kernels vectorize along these axes. Letters: N query heads, K KV heads, H head
size, B blocks, P tokens per block.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import Ops

from engine.runners.scoring import HIDDEN, Scoring
from engine.tinygrad.kernels.launch import (
    index,
    inside,
    lanes,
    launch,
    loop,
    reduction,
)

Stored = tuple[UOp, tuple[UOp, ...]]


@dataclass(frozen=True, slots=True)
class Pages:
    """The KV cache of one layer."""

    keys: Tensor  # (B, K, H, P)
    values: Tensor | None  # (B, K, P, H); None: the first values of a key are its value


@dataclass(frozen=True, slots=True)
class Work:
    """The positions, cache slots and block tables of a step's tokens."""

    positions: Tensor  # (T,)
    write_slots: Tensor  # (T,)
    rows: Tensor  # (T,) index into `tables`
    tables: Tensor  # (S, B)
    num_blocks: UOp  # a variable: the number of blocks in the longest table of the step


class PerHead(NamedTuple):
    """Values of a layer's query heads, (N,) each. None: the model has none."""

    slopes: Tensor | None = None  # of ALiBi
    sinks: Tensor | None = None  # logits that only add to the sum of softmax


def write(pages: Pages, k: Tensor, v: Tensor, write_slots: Tensor) -> Pages:
    """Writes keys and values (T, K, H) to their slots in the cache."""
    if pages.values is None:
        return Pages(launch("write_keys", _write_keys, pages.keys, k, write_slots)[0], None)
    keys, values, *_ = launch("write", _write, pages.keys, pages.values, k, v, write_slots)
    return Pages(keys, values)


def attend(
    q: Tensor, pages: Pages, work: Work, scoring: Scoring, per_head: PerHead, value_dim: int
) -> Tensor:
    """Attention of one layer over the cache: queries q (T, N, H) -> outputs (T, N, value_dim)"""
    num_tokens, num_heads, _ = q.shape
    block_size, bound, on_cpu = pages.keys.shape[3], work.num_blocks, q.device == "CPU"
    places = (num_tokens, num_heads, work.tables.shape[1], block_size)

    def room(*shape: int) -> Tensor:
        return Tensor.empty(*shape, dtype=dtypes.float32, device=q.device)

    where = (work.tables, work.rows, work.positions)
    slopes, sinks = (() if each is None else (each,) for each in per_head)
    scores, *_ = launch(
        "score",
        lambda *of: _score(*of, bound=inside(bound), scoring=scoring),
        *(room(*places), q, pages.keys, *where, *slopes),
        bound=bound,
        as_written=on_cpu,
    )
    best, *_ = launch(
        "best",
        lambda *of: _best(*of, bound=inside(bound)),
        *(room(num_tokens, num_heads), scores, *sinks),
        bound=bound,
    )
    weights, *_ = launch(
        "weigh",
        lambda *of: _weigh(*of, bound=inside(bound)),
        *(room(*places), scores, best),
        bound=bound,
    )
    ending = (best, *sinks) if sinks else ()
    by_key = pages.values is None
    values = pages.keys if pages.values is None else pages.values
    mixed, *_ = launch(
        "mix",
        lambda *of: _mix(*of, bound=inside(bound), by_key=by_key),
        *(room(num_tokens, num_heads, value_dim), weights, values, *where, *ending),
        bound=bound,
        as_written=on_cpu,
    )
    return mixed.cast(q.dtype)


def _write(keys: UOp, values: UOp, k: UOp, v: UOp, slots: UOp) -> Stored:
    block_size = keys.shape[3]
    t, head, h = loop(k.shape[0], 0), loop(k.shape[1], 1), loop(k.shape[2], 2)
    slot = index(slots[t])
    block, place = slot // block_size, slot % block_size
    key = keys[block, head, h, place].store(k[t, head, h].load())
    value = values[block, head, place, h].store(v[t, head, h].load())
    return UOp.group(key, value), (t, head, h)


def _write_keys(keys: UOp, k: UOp, slots: UOp) -> Stored:
    block_size = keys.shape[3]
    t, head, h = loop(k.shape[0], 0), loop(k.shape[1], 1), loop(k.shape[2], 2)
    slot = index(slots[t])
    place = keys[slot // block_size, head, h, slot % block_size]
    return place.store(k[t, head, h].load()), (t, head, h)


def _score(
    out: UOp,
    q: UOp,
    keys: UOp,
    tables: UOp,
    rows: UOp,
    positions: UOp,
    slopes: UOp | None = None,
    *,
    bound: UOp,
    scoring: Scoring,
) -> Stored:
    """Computes the score of each query with each key in the blocks of the query's sequence. The
    score is HIDDEN for keys that the query must not attend to.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, group = keys.shape[3], num_heads // keys.shape[1]
    t, n, b = loop(num_tokens, 0), loop(num_heads, 1), loop(bound, 2)
    p, places = lanes(block_size, 3)
    h = reduction(head_dim, 5)
    block = index(tables[index(rows[t]), b])
    product = q[t, n, h].load() * keys[block, n // group, h, p].load()
    score = product.cast(dtypes.float32).reduce(h, arg=Ops.ADD) * scoring.scale
    if scoring.softcap is not None:
        score = (score / scoring.softcap).tanh() * scoring.softcap
    distance = index(positions[t]) - (b * block_size + p)
    if slopes is not None:
        score = score - slopes[n].load() * distance.cast(dtypes.float32)
    visible = distance >= 0
    if scoring.window is not None:
        visible = visible & (distance < scoring.window)
    return out[t, n, b, p].store(visible.where(score, HIDDEN)), (t, n, b, *places)


def _best(out: UOp, scores: UOp, sinks: UOp | None = None, *, bound: UOp) -> Stored:
    t, n = loop(out.shape[0], 0), loop(out.shape[1], 1)
    b, p = reduction(bound, 2), reduction(scores.shape[3], 3)
    best = scores[t, n, b, p].load().reduce(b, p, arg=Ops.MAX)
    if sinks is not None:
        best = best.maximum(sinks[n].load().cast(dtypes.float32))
    return out[t, n].store(best), (t, n)


def _weigh(out: UOp, scores: UOp, best: UOp, *, bound: UOp) -> Stored:
    t, n, b, p = (
        *(loop(out.shape[0], 0), loop(out.shape[1], 1)),
        *(loop(bound, 2), loop(out.shape[3], 3)),
    )
    weight = (scores[t, n, b, p].load() - best[t, n].load()).exp()
    return out[t, n, b, p].store(weight), (t, n, b, p)


def _mix(
    out: UOp,
    weights: UOp,
    values: UOp,
    tables: UOp,
    rows: UOp,
    positions: UOp,
    best: UOp | None = None,
    sinks: UOp | None = None,
    *,
    bound: UOp,
    by_key: bool,
) -> Stored:
    """Computes the mean of the values, weighted by the softmax weights. Cache slots past a query's
    position may hold NaN that other sequences left there. So these slots are skipped, rather than
    multiplied by a weight of 0. With `by_key`, `values` are the keys, whose layout differs.
    """
    num_tokens, num_heads, head_dim = out.shape
    block_size, group = values.shape[3 if by_key else 2], num_heads // values.shape[1]
    t, n = loop(num_tokens, 0), loop(num_heads, 1)
    h, places = lanes(head_dim, 2)
    b, p = reduction(bound, 4), reduction(block_size, 5)
    block = index(tables[index(rows[t]), b])
    weight = weights[t, n, b, p].load()
    at = (h, p) if by_key else (p, h)
    value = values[block, n // group, *at].load().cast(dtypes.float32)
    visible = b * block_size + p <= index(positions[t])
    total = visible.where(weight * value, 0.0).reduce(b, p, arg=Ops.ADD)
    weights_sum = weight.reduce(b, p, arg=Ops.ADD)
    if best is not None and sinks is not None:
        weights_sum += (sinks[n].load().cast(dtypes.float32) - best[t, n].load()).exp()
    return out[t, n, h].store(total / weights_sum), (t, n, *places)
