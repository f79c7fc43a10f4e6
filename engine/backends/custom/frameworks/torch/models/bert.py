"""BERT, a post-norm text encoder. Each token attends to all tokens of its text."""

from torch import Tensor, nn

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.torch.layers.attention import Attention, Step
from engine.backends.custom.frameworks.torch.layers.embeddings import Embedding
from engine.backends.custom.frameworks.torch.layers.mlp import MLP
from engine.backends.custom.frameworks.torch.layers.norm import LayerNorm


class PostNormBlock(nn.Module):
    """One layer: attention, then MLP. The residual stream is normalized after each of them."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn = Attention(config, layer)
        self.attn_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)
        self.mlp_norm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = self.attn_norm(x + self.attn(x, step))  # (T, D)
        return self.mlp_norm(x + self.mlp(x))  # (T, D)


class Bert(nn.Module):
    """The encoder. Its input is the concatenated tokens of several texts. The `Step` knows where
    each text begins. All tokens have the token type 0.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.encoder is not None, config
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.position = Embedding(config.max_position, config.hidden_size)
        self.token_type = Embedding(config.encoder.num_token_types, config.hidden_size)
        self.embed_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.layers = nn.ModuleList(PostNormBlock(config, i) for i in range(config.num_layers))

    def forward(self, token_ids: Tensor, step: Step) -> Tensor:
        """Token ids (T,) -> hidden states of the tokens (T, D)"""
        x = self.embed(token_ids) + self.token_type.weight[0] + self.position(step.positions)
        x = self.embed_norm(x)
        for block in self.layers:
            x = block(x, step)
        return x
