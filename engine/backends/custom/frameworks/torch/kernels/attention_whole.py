"""Attention of a long prompt from its first token on, by cuDNN, over a copy of its pages.

Nothing lies before such a row, so a plain causal kernel will do, and the vendor's is the fastest
for long rows. It is prepared anew for every length it meets, so rows are padded to a few lengths.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

WHOLE_QUERIES = 2048  # from here on the copy is paid for
_LENGTHS = 512  # padded lengths are multiples of it


def has_vendor_kernel(head_dim: int, dtype: torch.dtype) -> bool:
    return (
        dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and torch.cuda.is_available()
        and torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability() >= (9, 0)
    )


@dataclass(frozen=True, slots=True)
class WholeRow:
    first_token: int  # in the step
    length: int
    first_block: int  # in the flattened tables

    def attend(self, q: Tensor, cache: Tensor, tables: Tensor, out: Tensor) -> None:
        """Queries of this row in q (T, N, H), their results to the same places of `out`."""
        tokens = slice(self.first_token, self.first_token + self.length)
        block_size = cache.shape[1]
        num_blocks = -(-self.length // block_size)
        padded = -(-self.length // _LENGTHS) * _LENGTHS
        blocks = tables.view(-1)[self.first_block : self.first_block + num_blocks]
        pages = cache.new_empty((-(-padded // block_size), *cache.shape[1:]))
        torch.index_select(cache, 0, blocks, out=pages[:num_blocks])
        pages[num_blocks:].zero_()
        keys_values = pages.flatten(0, 1)[:padded]  # (L, 2, K, H)
        k, v = (keys_values[:, kind].transpose(0, 1)[None] for kind in range(2))
        queries = q[tokens]
        if padded > self.length:
            queries = F.pad(queries, (0, 0, 0, 0, 0, padded - self.length))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None], k, v, is_causal=True, enable_gqa=True
            )
        out[tokens] = found[0].transpose(0, 1)[: self.length]
