"""Gumbel noise in PyTorch. On all devices, it has the random bits of the host sampler
(`runtime/samplers/host_sampler.py`).
"""

import torch
from torch import Tensor

from engine.runtime.samplers.host_sampler import MASK_31, MIX_1, MIX_2


def gumbel(keys: Tensor, words: Tensor) -> Tensor:
    """Standard Gumbel noise (R, V) from row keys (R, 2) and token words (V,)."""
    bits = words ^ keys[:, :1]  # (R, V) int32
    bits *= keys[:, 1:]
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= MIX_1
    bits ^= (bits >> 16) & 0xFFFF
    bits *= MIX_2
    bits &= MASK_31
    # Uniform numbers in (0, 1). Floats are most closely spaced near 0. Numbers near 0 also give the
    # largest noise, and the largest noise decides which token is sampled.
    uniform = bits.to(torch.float32).clamp_(0.5, 2.0**31 - 128).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_().neg_()
