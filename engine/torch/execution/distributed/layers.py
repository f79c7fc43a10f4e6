"""Layers of a shard. They replace layers of a finished model, and wrap them.

A layer whose input is cut (o, down) has a partial sum as its result; the ranks add their results.
A layer whose output is cut (q, k, v, gate, up) needs no communication, so it stays as it is.
"""

import torch
from torch import Tensor, nn

from engine.torch.execution.distributed.collectives import Ranks
from engine.torch.layers.norm import RMSNorm


class SummedLinear(nn.Module):
    """A linear layer, or a mixture of experts, whose results the ranks add. Only the first rank has
    the bias.
    """

    def __init__(self, inner: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.inner, self._ranks = inner, ranks
        self.is_invariant = bool(getattr(inner, "is_invariant", False))

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.sum(self.inner(x))

    def fused(self, x: Tensor, *, residual: Tensor) -> Tensor:
        """residual + the layer's result"""
        return residual + self(x)


class VocabEmbedding(nn.Module):
    """The rows `[start, start + size)` of the token table. Other ranks have the other rows."""

    def __init__(self, inner: nn.Module, start: int, size: int, ranks: Ranks) -> None:
        super().__init__()
        self.inner, self._ranks = inner, ranks
        self._start, self._size = start, size

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self._start
        is_here = (local >= 0) & (local < self._size)
        x: Tensor = self.inner(torch.where(is_here, local, 0))
        return self._ranks.sum(torch.where(is_here[:, None], x, 0))


class VocabHead(nn.Module):
    """The LM head for some of the vocabulary. The ranks join their logits. `width` is the largest
    number of logits that a rank has; ranks with fewer pad them.
    """

    def __init__(self, inner: nn.Module, width: int, vocab_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.inner, self._ranks = inner, ranks
        self._width, self._vocab_size = width, vocab_size
        self.is_invariant = bool(getattr(inner, "is_invariant", False))

    def forward(self, x: Tensor) -> Tensor:
        return self._whole(self.inner(x))

    def fused(self, x: Tensor, *, norm: RMSNorm) -> Tensor:
        """The logits of norm(x)."""
        fused: Tensor = self.inner.fused(x, norm=norm)  # type: ignore[operator]
        return self._whole(fused)

    def _whole(self, logits: Tensor) -> Tensor:
        """(R, own logits) -> (R, V). Padding is at the end, because only last ranks have fewer."""
        missing = self._width - logits.shape[-1]
        if missing:
            logits = nn.functional.pad(logits, (0, missing))
        return self._ranks.joined(logits)[:, : self._vocab_size]


class ReceivedStream(nn.Module):
    """Takes the place of the token table in later stages: the residual stream of the stage before,
    (T, D).
    """

    def __init__(self, size: int, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__()
        self._size, self._dtype, self._ranks = size, dtype, ranks

    def forward(self, ids: Tensor) -> Tensor:
        return self._ranks.receive((len(ids), self._size), self._dtype)
