"""The projections and norms of self-attention. The `Step` object computes attention itself. In
serving, it attends over the paged cache; in training and in parity tests, over the plain sequence.

The fused projection has query and key heads next to each other, so one operation rotates both.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.architectures.base import (
    LATENT_NORM_EPS,
    LatentConfig,
    ModelConfig,
)
from engine.torch.layers.linear import Linear
from engine.torch.layers.norm import RMSNorm
from engine.torch.layers.recurrent import RecurrentStep
from engine.torch.layers.rotary import Rotation, rotate


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Embeddings of images, and the indices of the tokens that they belong to."""

    rows: Tensor  # (E,) int64
    embeds: Tensor  # (E, D)


class Step(RecurrentStep, Protocol):
    """The inputs of a forward pass besides the token ids, and the function that computes attention
    in this pass.
    """

    @property
    def positions(self) -> Tensor:
        """The position of each token in its sequence, (T,)."""
        ...

    @property
    def images(self) -> "ImageRows | None":
        """Image embeddings, which replace those of some tokens. None: there are no images."""
        ...

    def attend(self, attention: "AnyAttention", qkv: Tensor) -> Tensor:
        """Computes the attention of one layer, from this step's tokens to these and earlier tokens.
        `qkv` is the fused projection, which `attention.heads` splits. Returns (T, N, H), or
        (T, N, L) in latent attention.
        """
        ...


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = (("q", queries), ("k", keys), ("v", keys))
        self.qkv = Linear(config.hidden_size, queries + 2 * keys, config.qkv_bias, parts)
        self.o = Linear(queries, config.hidden_size, config.out_bias)
        self.gate: Linear | None = None
        if config.attention_gate:
            self.gate = Linear(config.hidden_size, queries, config.qkv_bias)
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.window = config.layer(layer).window
        self.sinks: nn.Parameter | None = None
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(config.num_heads))
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.norms_whole = config.qk_norm == "whole"  # one norm over all heads of a token
        if config.qk_norm is not None:
            whole = self.norms_whole
            self.q_norm = RMSNorm(queries if whole else config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(keys if whole else config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.o(self.attended(x, step))

    def attended(self, x: Tensor, step: Step) -> Tensor:
        """The output of attention before the output projection, (T, N H)."""
        attended = step.attend(self, self._normed(self.qkv(x))).flatten(1)
        return attended if self.gate is None else attended * torch.sigmoid(self.gate(x))

    def fused(self, x: Tensor, norm: RMSNorm, step: Step) -> Tensor:
        """x + attention(norm(x)). It uses fused kernels, which are fast for few tokens."""
        qkv = self._normed(self.qkv.fused(x, norm=norm))
        attended = step.attend(self, qkv).flatten(1)
        if self.gate is not None:
            attended = attended * torch.sigmoid(self.gate.fused(x, norm=norm))
        return self.o.fused(attended, residual=x)

    @property
    def head_norms(self) -> tuple[RMSNorm | None, RMSNorm | None]:
        """The norm of each query head and the norm of each key head. Both are None if the model has
        no norms per head.
        """
        return (None, None) if self.norms_whole else (self.q_norm, self.k_norm)

    def _normed(self, qkv: Tensor) -> Tensor:
        """Normalizes q and k within qkv, if the model has one norm over all heads together."""
        if not self.norms_whole or self.q_norm is None or self.k_norm is None:
            return qkv
        keys = self.num_kv_heads * self.head_dim
        q, k, v = qkv.split((self.num_heads * self.head_dim, keys, keys), dim=-1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)

    def heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Splits the fused projection into queries (T, N, H), keys (T, K, H) and values (T, K, H).
        Applies norms per head and RoPE to queries and keys, if the model has them.
        """
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = qkv.unflatten(-1, (heads + 2 * kv_heads, self.head_dim))
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)  # (T, N + K, H), (T, K, H)
        q_norm, k_norm = self.head_norms
        if q_norm is not None and k_norm is not None:
            q, k = qk.split((heads, kv_heads), dim=1)
            qk = torch.cat((q_norm(q), k_norm(k)), dim=1)
        if rotation is not None:
            qk = rotate(qk, rotation)
        q, k = qk.split((heads, kv_heads), dim=1)
        return q, k, v


class HeadLinear(nn.Module):
    """A matrix per head: (T, N, in) -> (T, N, out)."""

    def __init__(self, heads: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self.weight.mT).transpose(0, 1)


class LatentAttention(nn.Module):
    """Multi-head latent attention. The fused projection has queries, or the vector that queries are
    computed from, then the latent of size L and the rotated key of size R.

    `k_up` turns queries into vectors that score latents. `v_up` turns sums of latents into values.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.latent = layer, latent
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.window, self.softcap, self.sinks = None, None, None
        queries = config.num_heads * (latent.nope_dim + latent.rope_dim)
        self.q_a_norm: RMSNorm | None = None
        self.q_b: Linear | None = None
        first = ("q", queries)
        if latent.q_rank is not None:
            first = ("q_a", latent.q_rank)
            self.q_a_norm = RMSNorm(latent.q_rank, LATENT_NORM_EPS)
            self.q_b = Linear(latent.q_rank, queries)
        self._width = first[1]
        parts = (first, ("kv_a", config.head_dim))
        self.qkv = Linear(config.hidden_size, first[1] + config.head_dim, parts=parts)
        self.kv_norm = RMSNorm(latent.kv_rank, LATENT_NORM_EPS)
        self.k_up = HeadLinear(config.num_heads, latent.nope_dim, latent.kv_rank)
        self.v_up = HeadLinear(config.num_heads, latent.kv_rank, latent.value_dim)
        self.o = Linear(config.attention_width, config.hidden_size)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.o(self.attended(x, step))

    def attended(self, x: Tensor, step: Step) -> Tensor:
        """The output of attention before the output projection, (T, N U)."""
        return self.v_up(step.attend(self, self.qkv(x))).flatten(1)

    def fused(self, x: Tensor, norm: RMSNorm, step: Step) -> Tensor:
        """x + attention(norm(x)). It uses fused kernels, which are fast for few tokens."""
        attended = step.attend(self, self.qkv.fused(x, norm=norm))
        return self.o.fused(self.v_up(attended).flatten(1), residual=x)

    def queries(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """The queries before RoPE: the part that scores latents (T, N, L), and the part that is to
        be rotated (T, N, R).
        """
        latent, q = self.latent, qkv[:, : self._width]
        if self.q_b is not None and self.q_a_norm is not None:
            q = self.q_b(self.q_a_norm(q.contiguous()))
        heads = q.unflatten(-1, (self.num_heads, -1))
        plain, turned = heads.split((latent.nope_dim, latent.rope_dim), dim=-1)
        return self.k_up(plain), turned

    def heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """The queries (T, N, L + R), the keys (T, 1, L + R), and the latents (T, 1, L), which are
        the values.
        """
        assert rotation is not None, "latent attention rotates"
        plain, turned = self.queries(qkv)
        q = torch.cat((plain, rotate(turned, rotation)), dim=-1)
        latent, key = qkv[:, self._width :].split((self.latent.kv_rank, self.latent.rope_dim), -1)
        values = self.kv_norm(latent.contiguous())[:, None]
        return q, torch.cat((values, rotate(key[:, None], rotation)), dim=-1), values


AnyAttention = Attention | LatentAttention


def make_attention(config: ModelConfig, layer: int) -> AnyAttention:
    if config.latent is None:
        return Attention(config, layer)
    return LatentAttention(config, config.latent, layer)
