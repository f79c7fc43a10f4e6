"""The decoder of all model families: embedding, blocks and LM head. There are two ways to run it.

Serving calls `forward` with a `Step` that reads and writes the paged cache. Parity tests and
training call `forward_sequence`. It uses the same modules without a cache and is differentiable.
"""

from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.architectures.base import ModelConfig
from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    additive_mask,
    attend_by_definition,
)
from engine.torch.kernels.skinny import is_few
from engine.torch.layers.attention import AnyAttention, Step
from engine.torch.layers.embeddings import Embedding
from engine.torch.layers.linear import Linear
from engine.torch.layers.norm import RMSNorm
from engine.torch.layers.recurrent import LayerState
from engine.torch.layers.rotary import Rotary, Rotation
from engine.torch.layers.scans import Rows, divide
from engine.torch.models.blocks import (
    Block,
    HalfBlock,
    make_block,
    make_norm,
)


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """A forward pass over one whole sequence, without a cache."""

    positions: Tensor  # (T,)
    rotations: tuple[Rotation | None, ...]  # one per layer
    masks: dict[int | None, Tensor]  # by window: (T, T), with ALiBi (N, T, T), added to scores
    rows: Rows | None
    images: None = None

    def state(self, layer: int) -> LayerState:
        return LayerState()

    def attend(self, attention: AnyAttention, qkv: Tensor) -> Tensor:
        heads = attention.heads(qkv, self.rotations[attention.layer])
        q, k, v = (x.transpose(0, 1)[None] for x in heads)  # (1, N or K, T, H)
        mask, scale = self.masks[attention.window], attention.scale
        if attention.softcap is None and attention.sinks is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask.to(q.dtype), scale=scale, enable_gqa=True
            )
        else:
            group, sinks = attention.num_heads // attention.num_kv_heads, attention.sinks
            out = attend_by_definition(
                q,
                k.repeat_interleave(group, dim=1),
                v.repeat_interleave(group, dim=1),
                mask,
                scale=scale,
                softcap=attention.softcap,
                sinks=None if sinks is None else sinks[:, None, None],
            )
        return out[0].transpose(0, 1)


class Decoder(nn.Module):
    """The decoder. Its parameters have the weight names that `architectures/` defines. Fused
    parameters combine several weights.
    """

    def __init__(self, config: ModelConfig, rotaries: tuple[Rotary, ...] = ()) -> None:
        """`rotaries` has the frequencies of each of `config.ropes`."""
        super().__init__()
        self.config = config
        self._rotaries = rotaries
        layers = (config.layer(index) for index in range(config.num_layers))
        self._rope_of = tuple(
            None if layer.rope is None else config.ropes.index(layer.rope) for layer in layers
        )
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(make_block(config, i) for i in range(config.num_layers))
        self.norm = make_norm(config)
        self.head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def embed_tokens(self, token_ids: Tensor, step: Step) -> Tensor:
        x = self.embed(token_ids)  # (T, D)
        multiplier = self.config.embedding_multiplier
        x = x if multiplier == 1 else x * multiplier
        images = step.images
        return x if images is None else x.index_copy(0, images.rows, images.embeds.to(x.dtype))

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
        assert isinstance(block, Block | HalfBlock)
        return block.last(*self._through(before, token_ids, step), step, rows)

    def _through(self, count: int, ids: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """Runs the first `count` blocks. Returns the residual stream, and the delta that still has
        to be added to it.
        """
        x, delta = self.embed_tokens(ids, step), None
        for block in self.layers[:count]:
            assert isinstance(block, Block | HalfBlock)
            x, delta = block.parts(x, delta, step)
        return x, delta

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream (R, D) -> logits (R, V) float32"""
        return self.head_logits(self.norm(x))

    def stream_logits(self, x: Tensor) -> Tensor:
        """Residual stream (R, D) -> logits (R, V) in the model's dtype"""
        if is_few(x) and isinstance(self.norm, RMSNorm) and not self.head.is_invariant:
            return self.finished(self.head.fused(x, norm=self.norm))
        return self.finished(self.head(self.norm(x)))

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the final norm (R, D) -> logits (R, V) float32"""
        return self.finished(self.head(hidden).to(torch.float32))

    def finished(self, logits: Tensor) -> Tensor:
        """Scales and bounds the results of the LM head, as the model says."""
        scaling, cap = self.config.logits_scaling, self.config.logits_softcap
        if scaling != 1:
            logits = logits / scaling
        if cap is not None:
            logits = (torch.tanh(logits.float() / cap) * cap).to(logits.dtype)
        return logits

    def rotations(self, positions: Tensor) -> tuple[Rotation | None, ...]:
        """The RoPE cosines and sines of the positions, for each layer."""
        dtype = self.norm.weight.dtype
        made = [rotary.rotation(positions, dtype) for rotary in self._rotaries]
        return tuple(None if index is None else made[index] for index in self._rope_of)

    def rotary_tables(self, num_positions: int) -> tuple[Tensor | None, ...]:
        """The RoPE table of all positions, for each layer. Layers with the same RoPE settings share
        one table.
        """
        made = [rotary.table(num_positions) for rotary in self._rotaries]
        return tuple(None if index is None else made[index] for index in self._rope_of)

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
        heads = AttentionHeads.of(self.config)
        slopes = heads.slopes(token_ids.device)
        if slopes is not None:
            slopes = slopes[:, None, None]
        masks = {window: additive_mask(distance, window, slopes) for window in heads.windows}
        rows = None
        if self.config.state is not None:
            ends, zero = np.array([0, len(token_ids)], np.int32), np.zeros(1, np.int32)
            rows = divide(ends, zero, zero, token_ids.device)
        return SequenceStep(positions, self.rotations(positions), masks, rows)
