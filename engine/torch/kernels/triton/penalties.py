"""Penalties and logit biases. Penalties depend on a row's earlier tokens, which are read from
device memory. The host may not know the last of them yet, because the device has just sampled it.

A first kernel counts a row's tokens. It uses one word per token id. The low bits of the word count
how often the token occurs in the output. One high bit says whether the token occurs in the prompt
or the output.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.kernels.sampling import Penalties

_BLOCK = 1024
_SEEN = tl.constexpr(1 << 30)


@triton.jit
def _penalizes(row, repetition_ptr, presence_ptr, frequency_ptr):
    repetition = tl.load(repetition_ptr + row)
    others = tl.abs(tl.load(presence_ptr + row)) + tl.abs(tl.load(frequency_ptr + row))
    return (repetition != 1.0) | (others != 0.0)


@triton.jit
def _count_kernel(
    history_ptr,
    slots_ptr,
    lengths_ptr,
    num_prompt_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    counts_ptr,
    history_stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    length = tl.load(lengths_ptr + row)
    if (start < length) & _penalizes(row, repetition_ptr, presence_ptr, frequency_ptr):
        columns = start + tl.arange(0, BLOCK)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        known = columns < length
        token = tl.load(history_ptr + slot * history_stride + columns, mask=known, other=0)
        place = counts_ptr + row * VOCABULARY + token
        sampled = known & (columns >= tl.load(num_prompt_ptr + row))
        tl.atomic_add(place, tl.full((BLOCK,), 1, tl.int32), mask=sampled)
        tl.atomic_or(place, tl.full((BLOCK,), _SEEN, tl.int32), mask=known)


@triton.jit
def _penalize_kernel(
    logits_ptr,
    counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    out_ptr,
    logits_stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < VOCABULARY
    value = tl.load(logits_ptr + row * logits_stride + columns, mask=inside, other=0.0)
    if _penalizes(row, repetition_ptr, presence_ptr, frequency_ptr):
        place = counts_ptr + row * VOCABULARY + columns
        word = tl.load(place, mask=inside, other=0)
        tl.store(place, tl.zeros((BLOCK,), tl.int32), mask=inside & (word != 0))
        times = (word & (_SEEN - 1)).to(tl.float32)
        repetition = tl.load(repetition_ptr + row)
        changed = tl.where(value > 0, value / repetition, value * repetition)
        changed -= tl.load(frequency_ptr + row) * times
        changed -= tl.load(presence_ptr + row) * (times > 0).to(tl.float32)
        value = tl.where(word != 0, changed, value)
    tl.store(out_ptr + row * VOCABULARY + columns, value, mask=inside)


@triton.jit
def _bias_kernel(logits_ptr, rows_ptr, ids_ptr, values_ptr, stride, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values_ptr + index, mask=index < count, other=0.0)
    row = tl.load(rows_ptr + index, mask=index < count, other=0).to(tl.int64)
    token = tl.load(ids_ptr + index, mask=index < count, other=0)
    tl.atomic_add(logits_ptr + row * stride + token, value, mask=value != 0.0)


def penalize(logits: Tensor, penalties: Penalties, counts: Tensor) -> Tensor:
    rows, vocabulary = logits.shape
    history, *_, repetition, presence, frequency = penalties
    settings = (repetition, presence, frequency)
    sizes = {"VOCABULARY": vocabulary, "BLOCK": _BLOCK}
    _count_kernel[(rows, triton.cdiv(history.shape[1], _BLOCK))](
        *penalties, counts, history.stride(0), **sizes
    )
    out = torch.empty((rows, vocabulary), dtype=logits.dtype, device=logits.device)
    _penalize_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))](
        logits, counts, *settings, out, logits.stride(0), **sizes
    )
    return out


def add_bias_(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    grid = (triton.cdiv(len(rows), 128),)
    _bias_kernel[grid](logits, rows, ids, values, logits.stride(0), len(rows), BLOCK=128)
    return logits
