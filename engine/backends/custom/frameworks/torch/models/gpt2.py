"""GPT-2: learned positions, layer norms, a plain feed-forward half, biases everywhere."""

from torch import Tensor, nn

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.torch.layers.attention import Attention, Step
from engine.backends.custom.frameworks.torch.layers.embeddings import Embedding
from engine.backends.custom.frameworks.torch.layers.mlp import MLP
from engine.backends.custom.frameworks.torch.layers.norm import LayerNorm
from engine.backends.custom.frameworks.torch.layers.rotary import Rotary
from engine.backends.custom.frameworks.torch.models.base import Decoder, PreNormBlock


class GPT2(Decoder):
    def __init__(self, config: ModelConfig, rotary: Rotary | None) -> None:
        super().__init__(config, rotary)
        self.position = Embedding(config.max_position, config.hidden_size)
        self.layers = nn.ModuleList(block(config, i) for i in range(config.num_layers))
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)

    def embed_tokens(self, token_ids: Tensor, step: Step) -> Tensor:
        return self.embed(token_ids) + self.position(step.positions)  # (T, D)


def block(config: ModelConfig, layer: int) -> PreNormBlock:
    return PreNormBlock(
        attn_norm=LayerNorm(config.hidden_size, config.norm_eps),
        attn=Attention(config, layer, fused=True),
        mlp_norm=LayerNorm(config.hidden_size, config.norm_eps),
        mlp=MLP(config),
    )
