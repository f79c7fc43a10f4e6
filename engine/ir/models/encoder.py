"""Builds a text encoder's graph from its `ModelConfig`. All encoder families use this one builder.

A step computes whole texts. Its result has one row per text: the pooled vector, or the score of a
cross-encoder before the sigmoid. The logit tokens of a step are the first tokens of the texts for
pooling "cls", and the last tokens for pooling "last" and "mean".
"""

from engine.architectures.base import EncoderConfig, ModelConfig, ScoreHead
from engine.core.errors import ModelFormatError
from engine.ir.attributes import Softcap
from engine.ir.graph import Graph
from engine.ir.models.decoder import DecoderBuilder
from engine.ir.models.inputs import LOGIT_TOKENS, TOKEN_TYPES


class EncoderBuilder(DecoderBuilder):
    """Adds the parts of an encoder to a graph."""

    def __init__(self, config: ModelConfig, encoder: EncoderConfig) -> None:
        super().__init__(config)
        self.encoder = encoder

    def embed(self) -> str:
        x, count = super().embed(), self.encoder.num_token_types
        if count:
            table = self.graph.weight("token_type.weight", count, self.config.hidden_size)
            types = self.graph.add("type_embed", "token_type", [TOKEN_TYPES], [table])
            x = self.add("typed_sum", x, types)
        return self.norm(x, "embed_norm")

    def layer(self, x: str, layer: int, is_last: bool) -> str:
        """Adds a layer. If pooling takes one token of each text, the last layer computes only that
        token after its attention.
        """
        name, is_post = f"layers.{layer}", self.config.norm_placement == "sum"
        # The embeddings are already normalized, so the first layer of a pre-norm encoder has no
        # norm before its attention.
        source = x if is_post or layer == 0 else self.norm(x, f"{name}.attn_norm")
        heads = self.attention(source, layer)
        if is_last and self.encoder.pooling != "mean":
            heads = self.wanted(heads, f"{name}.attn.wanted")
            x = self.wanted(x, f"{name}.wanted")
        x = self.add(f"{name}.attn_sum", x, self.out_projection(heads, layer))
        if is_post:
            x = self.norm(x, f"{name}.attn_norm")
        source = x if is_post else self.norm(x, f"{name}.mlp_norm")
        inner = self.mlp(source, layer)
        x = self.add(f"{name}.mlp_sum", x, self.down_projection(inner, layer))
        return self.norm(x, f"{name}.mlp_norm") if is_post else x

    def pooled(self, x: str) -> str:
        """The vector of each text, from the final states."""
        if self.config.norm_placement == "input":
            x = self.norm(x, "norm")
        if self.encoder.pooling == "mean":
            return self.graph.add("mean_rows", "pooled", [x, LOGIT_TOKENS])
        return x

    def score(self, x: str, head: ScoreHead) -> str:
        size = self.config.hidden_size
        x = self.linear(x, "score.dense", size, size, head.bias)
        if head.activation == "tanh":
            x = self.graph.add("softcap", "score.activation", [x], (), Softcap(1.0))
        else:
            x = self.graph.add(head.activation, "score.activation", [x])
        if head.norm:
            x = self.norm(x, "score.norm")
        return self.linear(x, "score.out", 1, size, has_bias=True)


def build_encoder_graph(config: ModelConfig) -> Graph:
    encoder = config.encoder
    if encoder is None or config.norm_placement not in ("input", "sum") or config.parallel:
        raise ModelFormatError(f"there is no encoder graph for the family '{config.family}'")
    builder = EncoderBuilder(config, encoder)
    x = builder.embed()
    for layer in range(config.num_layers):
        x = builder.layer(x, layer, is_last=layer == config.num_layers - 1)
    x = builder.pooled(x)
    if encoder.head is not None:
        x = builder.score(x, encoder.head)
    return builder.graph.build(x)
