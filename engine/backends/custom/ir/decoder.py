"""Builds a decoder's graph from its `ModelConfig`. All model families use this one builder."""

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.ir.attributes import (
    AttentionAttributes,
    HeadNorm,
    KvWrite,
    Lookup,
    Normalize,
    Rope,
    Scale,
)
from engine.backends.custom.ir.graph import Graph, GraphBuilder
from engine.core.errors import ModelFormatError

TOKEN_IDS = "token_ids"
POSITIONS = "positions"
WRITE_SLOTS = "write_slots"  # each token's place in the KV cache: block * block_size + offset
ROW_OF = "row_of"  # index of the sequence that each token belongs to
TABLES = "tables"  # block table of each sequence
LOGIT_TOKENS = "logit_tokens"
COSINES = "cosines"
SINES = "sines"


def cache_name(layer: int) -> str:
    return f"cache.{layer}"


class DecoderBuilder:
    """Adds the parts of a decoder to a graph. Methods return the names of the nodes that they add.
    The docstring of `architectures` lists the names of all weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.graph = GraphBuilder()
        self.graph.input(TOKEN_IDS, ("T",), "i32")
        self.graph.input(POSITIONS, ("T",), "i32")
        self.graph.input(WRITE_SLOTS, ("T",), "i64")
        self.graph.input(ROW_OF, ("T",), "i32")
        self.graph.input(TABLES, ("S", "B"), "i32")
        self.graph.input(LOGIT_TOKENS, ("R",), "i32")
        if config.rope is not None:
            self.graph.input(COSINES, ("T", config.rope.dim // 2))
            self.graph.input(SINES, ("T", config.rope.dim // 2))

    def embed(self) -> str:
        config = self.config
        table = self.graph.weight("embed.weight", config.vocab_size, config.hidden_size)
        lookup = Lookup(config.embedding_multiplier)
        tokens = self.graph.add("embed", "embed", [TOKEN_IDS], [table], lookup)
        if config.rope is not None:
            return tokens
        table = self.graph.weight("position.weight", config.max_position, config.hidden_size)
        places = self.graph.add("position_embed", "position", [POSITIONS], [table])
        return self.add("embed_sum", tokens, places)

    def norm(self, x: str, name: str) -> str:
        """Adds the model's kind of norm, which is an RMS norm or a layer norm."""
        size, kind = self.config.hidden_size, self.config.norm
        weights = [self.graph.weight(f"{name}.weight", size)]
        if kind == "layer":
            weights.append(self.graph.weight(f"{name}.bias", size))
        attributes = Normalize(self.config.norm_eps)
        return self.graph.add(f"{kind}_norm", name, [x], weights, attributes)

    def linear(self, x: str, name: str, rows: int, columns: int, has_bias: bool) -> str:
        weights = [self.graph.weight(f"{name}.weight", rows, columns)]
        if has_bias:
            weights.append(self.graph.weight(f"{name}.bias", rows))
        return self.graph.add("linear", name, [x], weights)

    def add(self, name: str, first: str, second: str) -> str:
        return self.graph.add("add", name, [first, second])

    def scale(self, x: str, name: str, factor: float) -> str:
        return self.graph.add("scale", name, [x], (), Scale(factor))

    def qkv(self, x: str, name: str) -> tuple[str, ...]:
        """Computes queries, keys and values with three matrices."""
        config = self.config
        return tuple(
            self.linear(
                x, f"{name}.{part}", heads * config.head_dim, config.hidden_size, config.qkv_bias
            )
            for part, heads in (
                ("q", config.num_heads),
                ("k", config.num_kv_heads),
                ("v", config.num_kv_heads),
            )
        )

    def attention(self, x: str, layer: int) -> str:
        """Adds the attention of a layer, without the output projection. The result is the
        concatenated output of all heads.
        """
        config, name = self.config, f"layers.{layer}.attn"
        kv_heads, size = config.num_kv_heads, config.head_dim
        q, k, v = self.qkv(x, name)
        q = self._heads(q, f"{name}.q", config.num_heads)
        k = self._heads(k, f"{name}.k", kv_heads)
        cache = self.graph.input(cache_name(layer), ("C", "P", 2, kv_heads, size))
        written = self.graph.add(
            "kv_write", f"{name}.kv", [cache, k, v, WRITE_SLOTS], (), KvWrite(layer, kv_heads, size)
        )
        return self.graph.add(
            "attention",
            f"{name}.heads",
            [q, written, POSITIONS, ROW_OF, TABLES],
            (),
            AttentionAttributes(
                layer,
                config.num_heads,
                kv_heads,
                size,
                config.attention_scale,
                config.sliding_window,
            ),
        )

    def _heads(self, x: str, name: str, heads: int) -> str:
        """Applies the norm of queries or keys and RoPE to `x`, if the model has them."""
        config = self.config
        if config.qk_norm == "whole":
            weight = self.graph.weight(f"{name}_norm.weight", heads * config.head_dim)
            whole = Normalize(config.norm_eps)
            x = self.graph.add("rms_norm", f"{name}_norm", [x], [weight], whole)
        elif config.qk_norm == "head":
            weight = self.graph.weight(f"{name}_norm.weight", config.head_dim)
            attributes = HeadNorm(heads, config.head_dim, config.norm_eps)
            x = self.graph.add("head_norm", f"{name}_norm", [x], [weight], attributes)
        if config.rope is not None:
            rotation = Rope(heads, config.head_dim, config.rope.dim)
            x = self.graph.add("rope", f"{name}_rope", [x, COSINES, SINES], (), rotation)
        return x

    def mlp(self, x: str, layer: int) -> str:
        """Adds the MLP of a layer, without the down projection. The result is activation(up), or
        activation(gate) * up in a gated MLP.
        """
        config, name = self.config, f"layers.{layer}.mlp"
        inner, hidden = config.intermediate_size, config.hidden_size
        first = "gate" if config.gated_mlp else "up"
        y = self.linear(x, f"{name}.{first}", inner, hidden, config.mlp_bias)
        y = self.graph.add(config.activation, f"{name}.activation", [y])
        if not config.gated_mlp:
            return y
        up = self.linear(x, f"{name}.up", inner, hidden, config.mlp_bias)
        return self.graph.add("mul", f"{name}.gated", [y, up])

    def read(self, x: str, name: str) -> str:
        """The input of attention or MLP. This is the residual stream, normalized if the model is
        pre-norm.
        """
        return self.norm(x, name) if self.config.norm_placement == "input" else x

    def merge(self, x: str, half: str, name: str) -> str:
        """Adds the output `half` of attention or MLP to the residual stream `x`. The names of the
        new nodes and weights start with `name`, such as "layers.0.attn".
        """
        config = self.config
        if config.norm_placement == "output":
            half = self.norm(half, f"{name}_norm")
        if config.residual_multiplier != 1:
            half = self.scale(half, f"{name}_scaled", config.residual_multiplier)
        return self.add(f"{name}_sum", x, half)

    def wanted(self, x: str, name: str) -> str:
        """Selects the rows of the tokens whose logits are needed."""
        return self.graph.add("gather_rows", name, [x, LOGIT_TOKENS])

    def logits(self, x: str) -> Graph:
        """Finishes the graph with the final norm and the LM head."""
        config = self.config
        x = self.norm(x, "norm")
        name = "embed.weight" if config.tie_embeddings else "head.weight"
        head = self.graph.weight(name, config.vocab_size, config.hidden_size)
        if config.logits_scaling == 1:
            return self.graph.build(self.graph.add("linear", "logits", [x], [head]))
        x = self.graph.add("linear", "head", [x], [head])
        return self.graph.build(self.scale(x, "logits", 1 / config.logits_scaling))


def build_graph(config: ModelConfig) -> Graph:
    """The decoder's graph. In each layer, attention and then an MLP add to the residual stream.

    Everything after the last layer's attention is computed only for tokens whose logits are needed.
    """
    if config.encoder is not None or config.norm_placement == "sum":
        raise ModelFormatError(f"there is no graph for models of the family '{config.family}'")
    builder, hidden = DecoderBuilder(config), config.hidden_size
    x = builder.embed()
    for layer in range(config.num_layers):
        name = f"layers.{layer}"
        heads = builder.attention(builder.read(x, f"{name}.attn_norm"), layer)
        if layer == config.num_layers - 1:
            heads = builder.wanted(heads, f"{name}.attn.wanted")
            x = builder.wanted(x, f"{name}.wanted")
        width = config.num_heads * config.head_dim
        half = builder.linear(heads, f"{name}.attn.o", hidden, width, config.out_bias)
        x = builder.merge(x, half, f"{name}.attn")
        inner = builder.mlp(builder.read(x, f"{name}.mlp_norm"), layer)
        width = config.intermediate_size
        half = builder.linear(inner, f"{name}.mlp.down", hidden, width, config.mlp_bias)
        x = builder.merge(x, half, f"{name}.mlp")
    return builder.logits(x)
