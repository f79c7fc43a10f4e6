"""The reference for paged attention. It is slow and simple: it computes one sequence at a time and
stores all scores.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.execution.transfer import to_device
from engine.backends.custom.frameworks.torch.kernels.attention_heads import (
    AttentionHeads,
    additive_mask,
    attend_by_definition,
    two_way,
)
from engine.backends.custom.frameworks.torch.kernels.fp8 import read_cache
from engine.backends.custom.runtime.model_runner import BatchInputs


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    inputs: BatchInputs
    device: torch.device
    block_size: int
    heads: AttentionHeads
    slopes: Tensor | None  # (N,)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        *,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = q.new_empty((*q.shape[:2], self.heads.value_dim))
        starts = self.inputs.query_start
        tables = to_device(self.inputs.tables_for(window), self.device)
        for row, length in enumerate(self.inputs.seq_lens):
            tokens = slice(starts[row], starts[row + 1])
            position = torch.arange(length, device=q.device)
            blocks = tables[row, position // self.block_size].long()
            offsets = position % self.block_size
            known = read_cache(cache, q.dtype, blocks, offsets).unbind(1)  # (L, K, H) each
            keys, values = known[0], known[-1][..., : self.heads.value_dim]
            distance = position[-(starts[row + 1] - starts[row]) :, None] - position  # (T, L)
            if self.inputs.visible_end is not None:
                ends = to_device(self.inputs.visible_end[tokens], q.device)
                distance = two_way(distance, position, ends)
            out[tokens] = self._row(q[tokens], keys, values, distance, window, sinks)
        return out

    def _row(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        distance: Tensor,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one sequence of L positions: q (T, N, H) -> (T, N, U).

        q has the queries of the last T positions. Keys (L, K, H) and values (L, K, U) are of all L
        positions.
        """
        group = q.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(group, dim=1)  # (L, N, H)
        values = values.repeat_interleave(group, dim=1)
        slopes = None if self.slopes is None else self.slopes[:, None, None]
        out = attend_by_definition(
            q.transpose(0, 1),  # (N, T, H)
            keys.transpose(0, 1),
            values.transpose(0, 1),
            additive_mask(distance, window, slopes),
            scale=self.heads.scale,
            softcap=self.heads.softcap,
            sinks=None if sinks is None else sinks[:, None, None],
        )
        return out.transpose(0, 1)


class ReferenceAttention:
    def __init__(self, heads: AttentionHeads, *, block_size: int, dtype: torch.dtype) -> None:
        self._block_size = block_size
        self._heads = heads

    def plan(self, inputs: BatchInputs, positions: Tensor) -> ReferencePlan:
        device = positions.device
        slopes = self._heads.slopes(device)
        return ReferencePlan(inputs, device, self._block_size, self._heads, slopes)
