"""The attention backends of PyTorch. A backend computes paged attention for a batch, which may mix
prefill and decode.

A backend makes a plan once per step, on the host. All layers use this plan. Backends differ only in
speed. Each backend is tested against the backend "reference".
"""

from typing import Protocol

import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.model_runner import BatchInputs
from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    ReferenceAttention,
)
from engine.torch.kernels.attention_sdpa import SdpaAttention
from engine.torch.kernels.attention_triton import TritonAttention
from engine.torch.kernels.invariant.attention import InvariantAttention


class AttentionPlan(Protocol):
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
        """Attention of one layer: queries q (T, N, H) -> outputs (T, N, U).

        k (T, K, H) and v (T, K, U) are the keys and values of this step's tokens. They are already
        in the cache, too. `cache` is (num_blocks, block_size, 2, K, H), with key before value. U is
        H, except in latent attention. There, the cache has keys only: (.., 1, 1, H), and the first
        U values of a key are its value.
        `window` must be one of `AttentionHeads.windows`. `sinks` (N,) are logits that only add to
        the sum of the softmax.
        """
        ...


class AttentionBackend(Protocol):
    def plan(self, inputs: BatchInputs, positions: Tensor) -> AttentionPlan:
        """Plans the attention of a step. `positions` is inputs.positions on the device, int64."""
        ...


class AttentionFactory(Protocol):
    def __call__(
        self, heads: AttentionHeads, *, block_size: int, dtype: torch.dtype
    ) -> AttentionBackend: ...


ATTENTION: dict[str, AttentionFactory] = {
    "reference": ReferenceAttention,
    "sdpa": SdpaAttention,
    "triton": TritonAttention,
}


def attention_backend(
    name: str,
    heads: AttentionHeads,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    invariant: bool = False,
) -> AttentionBackend:
    """`invariant` asks for results that do not depend on the other rows of a step."""
    if invariant:
        return InvariantAttention(heads, block_size=block_size, dtype=dtype)
    chosen = name
    if name == "auto":
        chosen = "triton" if device.type == "cuda" else "sdpa"
    if chosen not in ATTENTION:
        raise ConfigError(
            f"attention backend '{name}' is unknown; use auto or one of {', '.join(ATTENTION)}"
        )
    return ATTENTION[chosen](heads, block_size=block_size, dtype=dtype)
