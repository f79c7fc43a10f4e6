"""Start and end of a step: resolves input token ids, and checks the outputs for NaN."""

import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.kernels.base import compiled, use_triton

_resolve = compiled("tokens:resolve_tokens")
_guard = compiled("tokens:guard")


def resolve_tokens(
    token_ids: Tensor, token_rows: Tensor, slots: Tensor, last_token: Tensor
) -> Tensor:
    """(T,) int64; ids below 0 are replaced by the last token sampled for the token's slot."""
    if use_triton(token_ids):
        resolved: Tensor = _resolve(token_ids, token_rows, slots, last_token)
        return resolved
    sampled = last_token[slots[token_rows.long()].long()]
    return torch.where(token_ids < 0, sampled, token_ids).long()


def guard(
    x: Tensor, token_rows: Tensor, write_slots: Tensor, cache_slots: Tensor, finite: Tensor
) -> None:
    """Clears `finite` (S,) for rows with a non-finite token in x (T, D); erases its cache slot.

    The residual stream carries any NaN or infinity of a token to its end, so its sum reveals them.
    NaN in a block would reach the block's next owner. `cache_slots` is (layers, slots, 2, K, H).
    """
    if use_triton(x):
        _guard(x, token_rows, write_slots, cache_slots, finite)
        return
    bad = ~torch.isfinite(x.sum(dim=-1, dtype=torch.float32))
    finite[token_rows[bad].long()] = 0
    cache_slots[:, write_slots[bad].long()] = 0
