"""Builds a decoder's graph from its `ModelConfig`. All model families use this one builder."""

from engine.architectures.base import (
    LATENT_NORM_EPS,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
)
from engine.core.errors import ModelFormatError
from engine.ir.attributes import (
    AttentionAttributes,
    Experts,
    HeadLinear,
    HeadNorm,
    KvWrite,
    LatentWrite,
    Lookup,
    Normalize,
    Projection,
    Rope,
    Scale,
    Softcap,
)
from engine.ir.graph import Graph, GraphBuilder
from engine.ir.models.inputs import (
    LOGIT_TOKENS,
    POSITIONS,
    ROW_OF,
    SLOTS,
    TABLES,
    TOKEN_IDS,
    VISIBLE_END,
    WRITE_SLOTS,
    declare_cache,
    declare_inputs,
    rotation_names,
    state_name,
)
from engine.ir.plan import Routing
from engine.ir.recurrent import OP_NAMES, Recurrence


class DecoderBuilder:
    """Adds the parts of a decoder to a graph. Methods return the names of the nodes that they add.
    The docstring of `architectures` lists the names of all weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.graph = GraphBuilder()
        declare_inputs(self.graph, config)
        # The number of each layer's state.
        self._states = {layer: index for index, layer in enumerate(config.state_layers)}

    def embed(self) -> str:
        config = self.config
        table = self.graph.weight("embed.weight", config.vocab_size, config.hidden_size)
        lookup = Lookup(config.embedding_multiplier)
        tokens = self.graph.add("embed", "embed", [TOKEN_IDS], [table], lookup)
        if not config.learned_positions:
            return tokens
        table = self.graph.weight("position.weight", config.max_position, config.hidden_size)
        places = self.graph.add("position_embed", "position", [POSITIONS], [table])
        return self.add("embed_sum", tokens, places)

    def norm(self, x: str, name: str, weight: str | None = None) -> str:
        """Adds the model's kind of norm, which is an RMS norm or a layer norm. `weight` is the name
        of its weights, if it is not `name`.
        """
        size, kind, weight = self.config.hidden_size, self.config.norm, weight or name
        weights = [self.graph.weight(f"{weight}.weight", size)]
        if self.config.norm_bias:
            weights.append(self.graph.weight(f"{weight}.bias", size))
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
        kv_heads, size, latent = config.num_kv_heads, config.head_dim, config.latent
        encodes = config.encoder is not None
        # An encoder computes whole texts, so a layer's keys and values are not needed after it.
        place = 0 if encodes else layer
        if latent is not None:
            q, written = self._latent(x, latent, layer)
        else:
            q, k, v = self.qkv(x, name)
            q = self._heads(q, f"{name}.q", config.num_heads, layer)
            k = self._heads(k, f"{name}.k", kv_heads, layer)
            cache = declare_cache(self.graph, config, place)
            write, inputs = KvWrite(place, kv_heads, size), [cache, k, v, WRITE_SLOTS]
            written = self.graph.add("kv_write", f"{name}.kv", inputs, (), write)
        sinks = config.attention_sinks
        heads = self.graph.add(
            "attention",
            f"{name}.heads",
            [q, written, POSITIONS, ROW_OF, TABLES, *([VISIBLE_END] if encodes else [])],
            [self.graph.weight(f"{name}.sinks", config.num_heads)] if sinks else (),
            AttentionAttributes(
                place,
                config.num_heads,
                kv_heads,
                size,
                config.attention_scale,
                config.layer(layer).window,
                config.attention_softcap,
                config.alibi_bias,
                sinks,
                encodes and config.layer(layer).window is not None,
                0 if latent is None else latent.kv_rank,
            ),
        )
        if not config.attention_gate:
            return heads
        width = config.num_heads * size
        gate = self.linear(x, f"{name}.gate", width, config.hidden_size, config.qkv_bias)
        return self.graph.add("gate_rows", f"{name}.gated", [heads, gate])

    def mixed(self, x: str, layer: int) -> str:
        """Adds what combines the tokens of a layer, without the output projection: attention, or a
        mixer that keeps a state.
        """
        config, mixer, state = self.config, self.config.layer(layer).mixer, self.config.state
        if mixer == "attention":
            return self.attention(x, layer)
        assert state is not None and mixer != "none", config
        name, memory, hidden = f"layers.{layer}.mixer", state_name(layer), config.hidden_size
        recurrence = Recurrence(mixer, self._states[layer], hidden, state, config.norm_eps)
        parts = state.parts(mixer, hidden)
        weights = [
            self.graph.weight(f"{name}.{part}.weight", rows, hidden) for part, rows in parts.items()
        ]
        if state.proj_bias:
            weights += [
                self.graph.weight(f"{name}.{part}.bias", rows) for part, rows in parts.items()
            ]
        projection = Projection(len(parts), has_bias=state.proj_bias)
        projected = self.graph.add("projection", f"{name}.in", [x], weights, projection)
        self.graph.input(memory, ("Z", recurrence.sizes.state))
        own = recurrence.weight_shapes
        return self.graph.add(
            OP_NAMES[mixer],
            f"{name}.mixed",
            [projected, memory, POSITIONS, ROW_OF, SLOTS],
            [self.graph.weight(f"{name}.{each}", *shape) for each, shape in own.items()],
            recurrence,
        )

    def _latent(self, x: str, latent: LatentConfig, layer: int) -> tuple[str, str]:
        """Adds the queries of latent attention, which score latents, and the write of the latents.
        Returns the names of both.
        """
        config, name = self.config, f"layers.{layer}.attn"
        heads, size = config.num_heads, latent.nope_dim + latent.rope_dim
        rope = config.layer(layer).rope
        table = 0 if rope is None else config.ropes.index(rope)
        rotations = rotation_names(table)
        if latent.q_rank is None:
            q = self.linear(x, f"{name}.q", heads * size, config.hidden_size, has_bias=False)
        else:
            q = self.linear(x, f"{name}.q_a", latent.q_rank, config.hidden_size, has_bias=False)
            norm = self.graph.weight(f"{name}.q_a_norm.weight", latent.q_rank)
            eps = Normalize(LATENT_NORM_EPS)
            q = self.graph.add("rms_norm", f"{name}.q_a_norm", [q], [norm], eps)
            q = self.linear(q, f"{name}.q_b", heads * size, latent.q_rank, has_bias=False)
        matrix = self.graph.weight(f"{name}.k_up.weight", heads, latent.kv_rank, latent.nope_dim)
        rotated = HeadLinear(heads, latent.rope_dim, table)
        q = self.graph.add("head_linear", f"{name}.k_up", [q, *rotations], [matrix], rotated)
        width = config.head_dim
        kv = self.linear(x, f"{name}.kv_a", width, config.hidden_size, has_bias=False)
        cache = declare_cache(self.graph, config, layer)
        write = LatentWrite(layer, latent.kv_rank, latent.rope_dim, LATENT_NORM_EPS, table)
        norm = self.graph.weight(f"{name}.kv_norm.weight", latent.kv_rank)
        inputs = [kv, *rotations, cache, WRITE_SLOTS]
        return q, self.graph.add("latent_write", f"{name}.kv", inputs, [norm], write)

    def _heads(self, x: str, name: str, heads: int, layer: int) -> str:
        """Applies the norm of queries or keys and RoPE to `x`, if the layer has them."""
        config, rope = self.config, self.config.layer(layer).rope
        if config.qk_norm == "whole":
            weight = self.graph.weight(f"{name}_norm.weight", heads * config.head_dim)
            whole = Normalize(config.norm_eps)
            x = self.graph.add("rms_norm", f"{name}_norm", [x], [weight], whole)
        elif config.qk_norm == "head":
            weight = self.graph.weight(f"{name}_norm.weight", config.head_dim)
            attributes = HeadNorm(heads, config.head_dim, config.norm_eps)
            x = self.graph.add("head_norm", f"{name}_norm", [x], [weight], attributes)
        if rope is not None:
            table = config.ropes.index(rope)
            rotation = Rope(heads, config.head_dim, rope.dim, table)
            x = self.graph.add("rope", f"{name}_rope", [x, *rotation_names(table)], (), rotation)
        return x

    def out_projection(self, heads: str, layer: int) -> str:
        config, latent, name = self.config, self.config.latent, f"layers.{layer}.attn"
        mixer, state, hidden = config.layer(layer).mixer, config.state, config.hidden_size
        if mixer != "attention" and state is not None:
            width = state.sizes(mixer, hidden).out
            return self.linear(heads, f"layers.{layer}.mixer.o", hidden, width, state.proj_bias)
        if latent is not None:
            sizes = (config.num_heads, latent.value_dim, latent.kv_rank)
            matrix = self.graph.weight(f"{name}.v_up.weight", *sizes)
            each = HeadLinear(config.num_heads)
            heads = self.graph.add("head_linear", f"{name}.v_up", [heads], [matrix], each)
        return self.linear(heads, f"{name}.o", hidden, config.attention_width, config.out_bias)

    def mlp(self, x: str, layer: int) -> str:
        """Adds the MLP of a layer, without the down projection. The result is activation(up), or
        activation(gate) * up in a gated MLP.
        """
        config = self.config
        size, has_bias = config.intermediate_size, config.mlp_bias
        return self._inner(x, f"layers.{layer}.mlp", size, config.gated_mlp, has_bias)

    def _inner(self, x: str, name: str, size: int, gated: bool, has_bias: bool) -> str:
        hidden, activation = self.config.hidden_size, self.config.activation
        if activation == "swiglu_oai":
            raise ModelFormatError(f"{name}: the activation 'swiglu_oai' is only for experts")
        y = self.linear(x, f"{name}.{'gate' if gated else 'up'}", size, hidden, has_bias)
        y = self.graph.add(activation, f"{name}.activation", [y])
        if not gated:
            return y
        up = self.linear(x, f"{name}.up", size, hidden, has_bias)
        return self.graph.add("mul", f"{name}.gated", [y, up])

    def down_projection(self, inner: str, layer: int) -> str:
        config, name = self.config, f"layers.{layer}.mlp.down"
        size = config.intermediate_size
        return self.linear(inner, name, config.hidden_size, size, config.mlp_bias)

    def experts(self, x: str, experts: ExpertsConfig, layer: int) -> str:
        """The router and the routed experts of a layer: the weighted sum of their results."""
        config, name = self.config, f"layers.{layer}.experts"
        hidden, count, size = config.hidden_size, experts.count, experts.size
        logits = self.linear(x, f"{name}.router", count, hidden, experts.router_bias)
        routing = Routing(
            experts.per_token,
            experts.scoring,
            experts.renormalizes,
            experts.scale,
            experts.groups,
            experts.groups_per_token,
            experts.group_score,
        )
        correction = [self.graph.weight(f"{name}.correction", count)] if experts.correction else []
        chosen = self.graph.add("route", f"{name}.chosen", [logits], correction, routing)
        shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
        weights = [
            self.graph.weight(f"{name}.{part}.weight", count, *shape)
            for part, shape in shapes.items()
        ]
        if experts.bias:
            weights += [
                self.graph.weight(f"{name}.{part}.bias", count, rows)
                for part, (rows, _) in shapes.items()
            ]
        attributes = Experts(experts.per_token, config.activation, experts.bias)
        return self.graph.add("experts", name, [x, chosen], weights, attributes)

    def shared_expert(self, x: str, experts: ExpertsConfig, layer: int) -> str:
        """The expert that all tokens run through."""
        name, hidden = f"layers.{layer}.shared", self.config.hidden_size
        inner = self._inner(x, name, experts.shared_size, gated=True, has_bias=False)
        if experts.shared_gate:
            # Scaling the input of the down projection scales its result, because it has no bias.
            gate = self.linear(x, f"{name}.router", 1, hidden, has_bias=False)
            inner = self.graph.add("gate_rows", f"{name}.scaled", [inner, gate])
        return self.linear(inner, f"{name}.down", hidden, experts.shared_size, has_bias=False)

    def feed_forward(self, x: str, source: str, layer: int) -> str:
        """Adds the result of a layer's MLP or experts to the residual stream `x`. `source` is the
        MLP's input.
        """
        config, name = self.config, f"layers.{layer}"
        if not config.layer(layer).experts:
            half = self.down_projection(self.mlp(source, layer), layer)
            return self.merge(x, half, f"{name}.mlp")
        experts = config.experts
        if experts is None or (experts.shared_size and config.norm_placement != "input"):
            raise ModelFormatError(
                f"there is no graph for experts with norm placement '{config.norm_placement}'"
            )
        half = self.experts(source, experts, layer)
        if not experts.shared_size:
            return self.merge(x, half, f"{name}.mlp")
        x = self.merge(x, half, f"{name}.experts")
        return self.merge(x, self.shared_expert(source, experts, layer), f"{name}.mlp")

    def read(self, x: str, name: str, weight: str | None = None) -> str:
        """The input of attention or MLP. This is the residual stream, normalized if the model is
        pre-norm. `weight` is the name of the norm's weights, if it is not `name`.
        """
        is_normed = self.config.norm_placement in ("input", "both")
        return self.norm(x, name, weight) if is_normed else x

    def merge(self, x: str, half: str, name: str) -> str:
        """Adds the output `half` of attention or MLP to the residual stream `x`. The names of the
        new nodes and weights start with `name`, such as "layers.0.attn".
        """
        config = self.config
        if config.norm_placement in ("output", "both"):
            norm = "norm" if config.norm_placement == "output" else "out_norm"
            half = self.norm(half, f"{name}_{norm}")
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
        scaled, cap = config.logits_scaling != 1, config.logits_softcap
        x = self.graph.add("linear", "head" if scaled or cap else "logits", [x], [head])
        if scaled:
            x = self.scale(x, "scaled" if cap else "logits", 1 / config.logits_scaling)
        if cap:
            x = self.graph.add("softcap", "logits", [x], (), Softcap(cap))
        return self.graph.build(x)


def build_graph(config: ModelConfig) -> Graph:
    """The decoder's graph. In each layer, attention and then an MLP add to the residual stream.
    With `config.parallel`, both read the residual stream before the layer.

    Everything after the last layer's attention is computed only for tokens whose logits are needed.
    """
    if config.encoder is not None or config.norm_placement == "sum":
        raise ModelFormatError(f"there is no graph for models of the family '{config.family}'")
    builder = DecoderBuilder(config)
    x = builder.embed()
    for layer in range(config.num_layers):
        name, kind, heads = f"layers.{layer}", config.layer(layer), ""
        if kind.mixer != "none":
            heads = builder.mixed(builder.read(x, f"{name}.attn_norm"), layer)
        if layer == config.num_layers - 1:
            heads = heads and builder.wanted(heads, f"{name}.attn.wanted")
            x = builder.wanted(x, f"{name}.wanted")
        if config.parallel is not None:
            x = _parallel_halves(builder, x, heads, layer)
            continue
        if heads:
            x = builder.merge(x, builder.out_projection(heads, layer), f"{name}.attn")
        if kind.mlp:
            x = builder.feed_forward(x, builder.read(x, f"{name}.mlp_norm"), layer)
    return builder.logits(x)


def _parallel_halves(builder: DecoderBuilder, x: str, heads: str, layer: int) -> str:
    """The rest of a layer whose MLP reads the same residual stream as its attention. The MLP comes
    first, so that the residual stream can be added to in place.
    """
    if builder.config.layer(layer).experts:
        raise ModelFormatError("there is no graph for experts beside attention")
    name = f"layers.{layer}"
    weight = f"{name}.attn_norm" if builder.config.parallel == "shared" else None
    inner = builder.mlp(builder.read(x, f"{name}.mlp_norm", weight), layer)
    x = builder.merge(x, builder.out_projection(heads, layer), f"{name}.attn")
    return builder.merge(x, builder.down_projection(inner, layer), f"{name}.mlp")
