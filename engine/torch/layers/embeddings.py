"""Embedding tables for tokens and positions. The LM head may use the token table, too."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)
