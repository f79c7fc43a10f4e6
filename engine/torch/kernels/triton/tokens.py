"""Triton kernels of `kernels/tokens.py`. In `resolve_tokens`, a program handles up to 256 tokens.
In `guard`, a program checks one token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 256
_COLUMNS = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def _resolve_kernel(
    ids_ptr, rows_ptr, slots_ptr, last_ptr, out_ptr, num_tokens, TOKENS: tl.constexpr
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    given = tl.load(ids_ptr + token, mask=exists, other=0).to(tl.int64)
    unknown = exists & (given < 0)
    row = tl.load(rows_ptr + token, mask=unknown, other=0)
    slot = tl.load(slots_ptr + row, mask=unknown, other=0)
    sampled = tl.load(last_ptr + slot, mask=unknown, other=0).to(tl.int64)
    tl.store(out_ptr + token, tl.where(given < 0, sampled, given), mask=exists)


def resolve_tokens(
    token_ids: Tensor, token_rows: Tensor, slots: Tensor, last_token: Tensor
) -> Tensor:
    out = torch.empty(len(token_ids), dtype=torch.int64, device=token_ids.device)
    _resolve_kernel[(triton.cdiv(len(out), _TOKENS),)](
        token_ids, token_rows, slots, last_token, out, len(out), TOKENS=_TOKENS
    )
    return out


@triton.jit
def _guard_kernel(
    x_ptr,
    rows_ptr,
    slots_ptr,
    cache_ptr,
    finite_ptr,
    layer_stride,
    slot_stride,
    num_layers,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, SIZE, BLOCK):
        at = start + columns
        total += tl.load(x_ptr + token * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    # value - value is 0 only if the value is finite. Otherwise it is NaN, which is not equal to 0.
    value = tl.sum(total, 0)
    if value - value != 0.0:
        tl.store(finite_ptr + tl.load(rows_ptr + token), 0)
        place = cache_ptr + tl.load(slots_ptr + token).to(tl.int64) * slot_stride
        nothing = tl.zeros((BLOCK,), cache_ptr.dtype.element_ty)
        for _ in tl.range(0, num_layers):
            for start in tl.range(0, SLOT_SIZE, BLOCK):
                at = start + columns
                tl.store(place + at, nothing, mask=at < SLOT_SIZE)
            place += layer_stride


def guard(
    x: Tensor, token_rows: Tensor, write_slots: Tensor, cache_slots: Tensor, finite: Tensor
) -> None:
    assert x.is_contiguous() and cache_slots[0, 0].is_contiguous()
    _guard_kernel[(len(x),)](
        x,
        token_rows,
        write_slots,
        cache_slots,
        finite,
        cache_slots.stride(0),
        cache_slots.stride(1),
        cache_slots.shape[0],
        SIZE=x.shape[1],
        BLOCK=_COLUMNS,
        SLOT_SIZE=cache_slots[0, 0].numel(),
    )
