"""Attention over one whole sequence by its definition, which paged attention is compared with."""

import torch

from engine.runners.scoring import Scoring


def plain_attention(q, k, v, scoring: Scoring, slopes=None, sinks=None):
    """q (T, N, H), k and v (T, K, H) -> (T, N, H). `slopes` and `sinks` are (N,)."""
    queries, keys, values = (torch.from_numpy(x).transpose(0, 1) for x in (q, k, v))
    group = len(queries) // len(keys)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = queries @ keys.transpose(1, 2) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    if slopes is not None:
        scores = scores - torch.from_numpy(slopes)[:, None, None] * distance
    hidden = (distance < 0) | (distance >= (scoring.window or len(q)))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = torch.from_numpy(sinks)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(q)]
    return (weights @ values).transpose(0, 1).numpy()
