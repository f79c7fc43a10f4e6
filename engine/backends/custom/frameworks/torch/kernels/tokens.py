"""Two ops: one replaces placeholders in a step's token ids by sampled tokens, at its start. The
other checks the step's outputs for NaN, at its end.
"""

import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.kernels.base import compiled, use_triton

_resolve = compiled("tokens:resolve_tokens")
_guard = compiled("tokens:guard")


def resolve_tokens(
    token_ids: Tensor, token_rows: Tensor, slots: Tensor, last_token: Tensor
) -> Tensor:
    """The token ids of a step, (T,) int64. Ids below 0 are replaced by the last token that was
    sampled for the slot of the token's row.
    """
    if use_triton(token_ids):
        resolved: Tensor = _resolve(token_ids, token_rows, slots, last_token)
        return resolved
    sampled = last_token[slots[token_rows.long()].long()]
    return torch.where(token_ids < 0, sampled, token_ids).long()


def guard(
    x: Tensor, token_rows: Tensor, write_slots: Tensor, cache_slots: Tensor, finite: Tensor
) -> None:
    """Sets `finite` (S,) to 0 for each row that has a token with NaN or infinity in x (T, D). Also
    erases what such a token wrote to the cache.

    x is the residual stream after the last layer, or the last layer's attention output. It carries
    any NaN or infinity of earlier layers, so its sum reveals them. NaN in a cache block would reach
    the next sequence that uses the block. `cache_slots` is (layers, slots, 2, K, H).
    """
    if use_triton(x):
        _guard(x, token_rows, write_slots, cache_slots, finite)
        return
    bad = ~torch.isfinite(x.sum(dim=-1, dtype=torch.float32))
    finite[token_rows[bad].long()] = 0
    cache_slots[:, write_slots[bad].long()] = 0
