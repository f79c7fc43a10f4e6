"""Two ops that run at the start and at the end of a step. `resolve_tokens` replaces placeholders in
the step's token ids by sampled tokens. `guard` checks the step's outputs for NaN and infinity.
"""

import torch
from torch import Tensor

from engine.torch.kernels.base import compiled, use_triton

_resolve = compiled("tokens:resolve_tokens")
_guard = compiled("tokens:guard")


def resolve_tokens(
    token_ids: Tensor, token_rows: Tensor, slots: Tensor, last_token: Tensor
) -> Tensor:
    """The token ids of a step, (T,) int64. Ids below 0 are replaced by the last token that was
    sampled for the token's sequence. `token_rows` (T,) has the row of each token, `slots` (S,) the
    slot of each row.
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
    erases the keys and values that such a token wrote to the cache. Otherwise the NaN would reach
    the next sequence that uses the cache block.

    x is the residual stream after the last layer, or the last layer's attention output. NaN and
    infinity of earlier layers are still in x, so the sum of a token's values reveals them.
    `cache_slots` is (layers, slots, 2, K, H).
    """
    if use_triton(x):
        _guard(x, token_rows, write_slots, cache_slots, finite)
        return
    bad = ~torch.isfinite(x.sum(dim=-1, dtype=torch.float32))
    finite[token_rows[bad].long()] = 0
    cache_slots[:, write_slots[bad].long()] = 0
