"""Both ends of a step: which tokens go in, and whether what came out is finite."""

import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.kernels.base import compiled, use_triton

_resolve = compiled("tokens:resolve_tokens")
_guard = compiled("tokens:guard")


def resolve_tokens(
    token_ids: Tensor, token_rows: Tensor, slots: Tensor, last_token: Tensor
) -> Tensor:
    """(T,) int64: ids below 0 stand for the last token drawn for the slot of the token's row."""
    if use_triton(token_ids):
        resolved: Tensor = _resolve(token_ids, token_rows, slots, last_token)
        return resolved
    drawn = last_token[slots[token_rows.long()].long()]
    return torch.where(token_ids < 0, drawn, token_ids).long()


def guard(
    x: Tensor, token_rows: Tensor, write_slots: Tensor, cache_slots: Tensor, finite: Tensor
) -> None:
    """Clear `finite` (S,) for rows with a token in x (T, D) that is not; erase what it cached.

    The residual stream carries any NaN or infinity of a token to its end, so its sum tells. A block
    that held NaN would poison its next owner. `cache_slots` is (layers, slots, 2, K, H).
    """
    if use_triton(x):
        _guard(x, token_rows, write_slots, cache_slots, finite)
        return
    bad = ~torch.isfinite(x.sum(dim=-1, dtype=torch.float32))
    finite[token_rows[bad].long()] = 0
    cache_slots[:, write_slots[bad].long()] = 0
