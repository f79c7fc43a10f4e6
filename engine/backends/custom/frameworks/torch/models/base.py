"""The decoder of all model families: embedding, blocks and LM head. There are two ways to run it.

Serving calls `forward` with a `Step` that reads and writes the paged cache. Parity tests and
training call `forward_sequence`. It uses the same modules without a cache and is differentiable.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.torch.kernels.skinny import is_few
from engine.backends.custom.frameworks.torch.layers.attention import Attention, Step
from engine.backends.custom.frameworks.torch.layers.embeddings import Embedding
from engine.backends.custom.frameworks.torch.layers.linear import Linear, can_add
from engine.backends.custom.frameworks.torch.layers.mlp import MLP, GatedMLP
from engine.backends.custom.frameworks.torch.layers.norm import LayerNorm, RMSNorm
from engine.backends.custom.frameworks.torch.layers.rotary import Rotary, Rotation

Norm = RMSNorm | LayerNorm


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """A forward pass over one whole sequence, without a cache."""

    positions: Tensor  # (T,)
    rotation: Rotation | None
    visible: Tensor  # (T, T) bool: the keys that each query attends to

    def attend(self, attention: Attention, qkv: Tensor) -> Tensor:
        heads = attention.heads(qkv, self.rotation)
        q, k, v = (x.transpose(0, 1)[None] for x in heads)  # (1, N or K, T, H)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.visible, scale=attention.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class Block(nn.Module, ABC):
    """One layer: attention, then MLP. Both add to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attn = Attention(config, layer)
        self.mlp = GatedMLP(config) if config.gated_mlp else MLP(config)
        self.multiplier = config.residual_multiplier

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.halves(x, step)[2]

    @abstractmethod
    def halves(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output of attention, the output of the MLP, and the residual stream after the
        layer.
        """

    @abstractmethod
    def parts(self, x: Tensor, delta: Tensor | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """Runs the layer. Returns a residual stream, and a delta that still has to be added to this
        stream. The next layer's norm adds the delta in the same kernel. The delta is None if it was
        already added. In this case x may have been modified in place.
        """

    @abstractmethod
    def last(
        self, x: Tensor, delta: Tensor | None, step: Step, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer as the last layer of the model. Returns the residual stream after it,
        (R, D), only for the tokens with the indices `rows`, because only their logits are needed.
        Also returns the attention output of all tokens, (T, N H). The caller checks this output for
        NaN, which shows that a token has written NaN to the cache.
        """

    def _scaled(self, half: Tensor) -> Tensor:
        return half if self.multiplier == 1 else half * self.multiplier


class InputNormBlock(Block):
    """A pre-norm block: attention and MLP read a normalized copy of the residual stream."""

    def halves(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        attended = self.attn(self.attn_norm(x), step)
        normed, x = self.mlp_norm.add(self._scaled(attended), x)
        fed = self.mlp(normed)
        return attended, fed, x + self._scaled(fed)

    def parts(self, x: Tensor, delta: Tensor | None, step: Step) -> tuple[Tensor, Tensor | None]:
        attn, attn_norm, mlp, mlp_norm = self.attn, self.attn_norm, self.mlp, self.mlp_norm
        if self._is_few(x):
            assert isinstance(attn_norm, RMSNorm) and isinstance(mlp_norm, RMSNorm)
            assert delta is None, "all blocks are alike"
            assert isinstance(mlp, GatedMLP)
            return mlp.fused(attn.fused(x, attn_norm, step), mlp_norm), None
        if can_add(attn.o, x) and can_add(mlp.down, x):
            assert delta is None, "all blocks are alike"
            x = attn.o.add_to(x, attn.attended(attn_norm(x), step), self.multiplier)
            return mlp.down.add_to(x, mlp.activated(mlp_norm(x)), self.multiplier), None
        normed, x = self._normed(x, delta)
        normed, x = mlp_norm.add(self._scaled(attn(normed, step)), x)
        return x, self._scaled(mlp(normed))

    def last(
        self, x: Tensor, delta: Tensor | None, step: Step, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed, x = self._normed(x, delta)
        attended = self.attn.attended(normed, step)
        x, chosen = x.index_select(0, rows), attended.index_select(0, rows)
        if not len(rows):
            return x, attended
        if self._is_few(x):
            assert isinstance(self.mlp, GatedMLP) and isinstance(self.mlp_norm, RMSNorm)
            return self.mlp.fused(self.attn.o.fused(chosen, residual=x), self.mlp_norm), attended
        normed, x = self.mlp_norm.add(self._scaled(self.attn.o(chosen)), x)
        return x + self._scaled(self.mlp(normed)), attended

    def _is_few(self, x: Tensor) -> bool:
        """Whether x has so few tokens that attention and MLP use fused kernels. These kernels also
        add to the residual stream.
        """
        return is_few(x) and isinstance(self.mlp, GatedMLP) and self.multiplier == 1

    def _normed(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds the delta of the previous layer, if any, to the residual stream x. Returns the
        normalized input of attention, and the new residual stream.
        """
        return (self.attn_norm(x), x) if delta is None else self.attn_norm.add(delta, x)


class OutputNormBlock(Block):
    """Attention and MLP read the residual stream itself, without a norm. Their outputs are
    normalized before they are added to the residual stream.
    """

    def halves(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        attended = self.attn(x, step)
        x = x + self._scaled(self.attn_norm(attended))
        fed = self.mlp(x)
        return attended, fed, x + self._scaled(self.mlp_norm(fed))

    def parts(self, x: Tensor, delta: Tensor | None, step: Step) -> tuple[Tensor, Tensor | None]:
        assert delta is None, "all blocks are alike"
        return self.halves(x, step)[2], None

    def last(
        self, x: Tensor, delta: Tensor | None, step: Step, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        attended = self.attn.attended(x, step)
        x, chosen = x.index_select(0, rows), attended.index_select(0, rows)
        if not len(rows):
            return x, attended
        x = x + self._scaled(self.attn_norm(self.attn.o(chosen)))
        return x + self._scaled(self.mlp_norm(self.mlp(x))), attended


BLOCKS: dict[str, type[Block]] = {"input": InputNormBlock, "output": OutputNormBlock}


def make_norm(config: ModelConfig) -> Norm:
    kind = RMSNorm if config.norm == "rms" else LayerNorm
    return kind(config.hidden_size, config.norm_eps)


class Decoder(nn.Module):
    """The decoder. Its parameters have the weight names that `architectures/` defines. Fused
    parameters combine several weights.
    """

    def __init__(self, config: ModelConfig, rotary: Rotary | None) -> None:
        super().__init__()
        self.config = config
        self.rotary = rotary
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        block = BLOCKS[config.norm_placement]
        self.layers = nn.ModuleList(block(config, i) for i in range(config.num_layers))
        self.norm = make_norm(config)
        self.head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def embed_tokens(self, token_ids: Tensor, step: Step) -> Tensor:
        x = self.embed(token_ids)  # (T, D)
        multiplier = self.config.embedding_multiplier
        return x if multiplier == 1 else x * multiplier

    def forward(self, token_ids: Tensor, step: Step) -> Tensor:
        """The residual stream after the last block, (T, D). The caller passes the tokens whose
        logits it needs to `logits` or `stream_logits`.
        """
        x, delta = self._through(len(self.layers), token_ids, step)
        return x if delta is None else x + delta

    def forward_rows(self, token_ids: Tensor, step: Step, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, but the result has only the tokens with the indices `rows`. Returns the
        results of `Block.last`.
        """
        before = len(self.layers) - 1
        block = self.layers[before]
        assert isinstance(block, Block)
        return block.last(*self._through(before, token_ids, step), step, rows)

    def _through(self, count: int, ids: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """Runs the first `count` blocks. Returns the residual stream, and the delta that still has
        to be added to it.
        """
        x, delta = self.embed_tokens(ids, step), None
        for block in self.layers[:count]:
            assert isinstance(block, Block)
            x, delta = block.parts(x, delta, step)
        return x, delta

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream (R, D) -> logits (R, V) float32"""
        return self.head_logits(self.norm(x))

    def stream_logits(self, x: Tensor) -> Tensor:
        """Residual stream (R, D) -> logits (R, V) in the model's dtype"""
        if is_few(x) and isinstance(self.norm, RMSNorm):
            return self._divided(self.head.fused(x, norm=self.norm))
        return self._divided(self.head(self.norm(x)))

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the final norm (R, D) -> logits (R, V) float32"""
        return self._divided(self.head(hidden).to(torch.float32))

    def _divided(self, logits: Tensor) -> Tensor:
        scaling = self.config.logits_scaling
        return logits if scaling == 1 else logits / scaling

    def rotation(self, positions: Tensor) -> Rotation | None:
        if self.rotary is None:
            return None
        return self.rotary.rotation(positions, self.norm.weight.dtype)

    @overload
    def forward_sequence(self, token_ids: Tensor) -> Tensor: ...
    @overload
    def forward_sequence(
        self, token_ids: Tensor, with_states: Literal[True]
    ) -> tuple[Tensor, list[Tensor]]: ...
    def forward_sequence(
        self, token_ids: Tensor, with_states: bool = False
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """The logits (T, V) of one sequence of token ids (T,). With `with_states`, also a list of
        the residual stream before the first block and after each block.
        """
        step = self.sequence_step(token_ids)
        states = [self.embed_tokens(token_ids, step)]
        for block in self.layers:
            states.append(block(states[-1], step))
        logits = self.logits(states[-1])
        return (logits, states) if with_states else logits

    def sequence_step(self, token_ids: Tensor) -> SequenceStep:
        positions = torch.arange(len(token_ids), device=token_ids.device)
        distance = positions[:, None] - positions
        visible = distance >= 0
        if self.config.sliding_window is not None:
            visible &= distance < self.config.sliding_window
        return SequenceStep(positions, self.rotation(positions), visible)
