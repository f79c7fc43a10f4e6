"""Text encoders: BERT and its descendants. Each token attends to all tokens of its text."""

import torch
from torch import Tensor, nn

from engine.architectures.base import ModelConfig, ScoreHead
from engine.torch.kernels.activation import activate
from engine.torch.layers.attention import Attention, Step
from engine.torch.layers.embeddings import Embedding
from engine.torch.layers.linear import Linear
from engine.torch.layers.mlp import MLP, GatedMLP
from engine.torch.layers.norm import LayerNorm


def _norm(config: ModelConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias)


class EncoderBlock(nn.Module):
    """One layer: attention, then MLP. In a post-norm encoder, the residual stream is normalized
    after each of them. In a pre-norm encoder, their inputs are normalized, except that of the first
    layer's attention, because the embeddings are normalized already.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.is_post = config.norm_placement == "sum"
        self.attn = Attention(config, layer)
        self.attn_norm = _norm(config) if self.is_post or layer > 0 else None
        self.mlp = GatedMLP(config) if config.gated_mlp else MLP(config)
        self.mlp_norm = _norm(config)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        if self.is_post:
            assert self.attn_norm is not None
            x = self.attn_norm(x + self.attn(x, step))  # (T, D)
            return self.mlp_norm(x + self.mlp(x))  # (T, D)
        x = x + self.attn(x if self.attn_norm is None else self.attn_norm(x), step)
        return x + self.mlp(self.mlp_norm(x))


class Score(nn.Module):
    """The head of a cross-encoder: pooled vectors (S, D) -> logits (S, 1)."""

    def __init__(self, config: ModelConfig, head: ScoreHead) -> None:
        super().__init__()
        self.activation = head.activation
        self.dense = Linear(config.hidden_size, config.hidden_size, head.bias)
        self.norm = _norm(config) if head.norm else None
        self.out = Linear(config.hidden_size, 1, True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        x = torch.tanh(x) if self.activation == "tanh" else activate(x, self.activation)
        return self.out(x if self.norm is None else self.norm(x))


class TextEncoder(nn.Module):
    """The encoder. Its input is the concatenated tokens of several texts. The `Step` knows where
    each text begins.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        encoder, size = config.encoder, config.hidden_size
        assert encoder is not None, config
        self.config = config
        self.embed = Embedding(config.vocab_size, size)
        self.position = Embedding(config.max_position, size) if config.learned_positions else None
        count = encoder.num_token_types
        self.token_type = Embedding(count, size) if count else None
        self.embed_norm = _norm(config)
        self.layers = nn.ModuleList(EncoderBlock(config, i) for i in range(config.num_layers))
        self.norm = None if config.norm_placement == "sum" else _norm(config)
        self.score = None if encoder.head is None else Score(config, encoder.head)

    def forward(self, token_ids: Tensor, types: Tensor, step: Step) -> Tensor:
        """Token ids and token types (T,) -> hidden states of the tokens (T, D)"""
        x = self.embed(token_ids)
        if self.position is not None:
            x = x + self.position(step.positions)
        if self.token_type is not None:
            x = x + self.token_type(types)
        x = self.embed_norm(x)
        for block in self.layers:
            x = block(x, step)
        return x if self.norm is None else self.norm(x)
