"""GPT-2: the decoder with learned position embeddings, which are added to the token embeddings."""

from torch import Tensor

from engine.architectures.base import ModelConfig
from engine.torch.layers.attention import Step
from engine.torch.layers.embeddings import Embedding
from engine.torch.layers.rotary import Rotary
from engine.torch.models.base import Decoder


class GPT2(Decoder):
    def __init__(self, config: ModelConfig, rotaries: tuple[Rotary, ...] = ()) -> None:
        super().__init__(config, rotaries)
        self.position = Embedding(config.max_position, config.hidden_size)

    def embed_tokens(self, token_ids: Tensor, step: Step) -> Tensor:
        return super().embed_tokens(token_ids, step) + self.position(step.positions)  # (T, D)
