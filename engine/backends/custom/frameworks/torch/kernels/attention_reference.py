"""The reference for paged attention. It is slow and simple: it computes one sequence at a time and
stores all scores.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.torch.execution.transfer import to_device
from engine.backends.custom.runtime.model_runner import BatchInputs


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    inputs: BatchInputs
    tables: Tensor  # inputs.block_tables on the device
    block_size: int
    window: int | None
    scale: float

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
        out = torch.empty_like(q)
        starts = self.inputs.query_start
        for row, length in enumerate(self.inputs.seq_lens):
            tokens = slice(starts[row], starts[row + 1])
            position = torch.arange(length, device=q.device)
            blocks = self.tables[row, position // self.block_size].long()
            offsets = position % self.block_size
            keys, values = cache[blocks, offsets].unbind(1)  # (L, K, H) each
            out[tokens] = self._row(q[tokens], keys, values, position)
        return out

    def _row(self, q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """Attention of one sequence of L positions: q (T, N, H) -> (T, N, H).

        q has the queries of the last T positions. Keys and values (L, K, H) are of all L positions.
        """
        group = q.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(group, dim=1)  # (L, N, H)
        values = values.repeat_interleave(group, dim=1)
        scores = torch.einsum("tnh,lnh->ntl", q.float(), keys.float()) * self.scale
        distance = position[-q.shape[0] :, None] - position  # (T, L)
        hidden = distance < 0
        if self.window is not None:
            hidden |= distance >= self.window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.einsum("ntl,lnh->tnh", weights, values.float()).to(q.dtype)


class ReferenceAttention:
    def __init__(self, config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> None:
        self._block_size = block_size
        self._window = config.sliding_window
        self._scale = config.attention_scale

    def plan(self, inputs: BatchInputs, positions: Tensor) -> ReferencePlan:
        tables = to_device(inputs.block_tables, positions.device)
        return ReferencePlan(inputs, tables, self._block_size, self._window, self._scale)
