"""A model family as data: its hyperparameters, and the protocol that every family has.

A family builds a `ModelConfig` from a Hugging Face `config.json` or from GGUF metadata and lists
its weights as `TensorSpec`s (`family.py` defines what a family consists of). The config and the
list of weights are all that a framework needs to know about a model. This module reads no tensors.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from engine.architectures.hybrids.states import STATE_MIXERS, Mixer, StateConfig
from engine.architectures.tensors import TensorSpec
from engine.architectures.vision import VisionConfig
from engine.core.errors import ModelFormatError

MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """RoPE settings. `kind` is the scaling rule. Fields that the rule does not use are None."""

    theta: float
    dim: int  # RoPE rotates this many dimensions of each head
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors"] = (
        "default"
    )
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None  # only for kind "llama3"
    high_freq_factor: float | None = None  # only for kind "llama3"
    beta_fast: float | None = None  # only for kind "yarn"
    beta_slow: float | None = None  # only for kind "yarn"
    truncate: bool = True  # only for kind "yarn": rounds the bounds of the blended dimensions
    # Only for kind "longrope": the frequencies are divided by the short factors if the runner
    # serves at most `original_max_position` tokens, else by the long ones. dim / 2 numbers each
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    # If these are given, the tokens of an image have three positions: in time, and the row and the
    # column in the image. They are the numbers of frequencies that rotate by each, in turn.
    sections: tuple[int, ...] = ()
    # Only for kinds "yarn" and "longrope": multiplies cosines and sines. None: the default of
    # "yarn", which is 0.1 ln(factor) + 1
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """The head of a cross-encoder. It computes the score of a pair of texts from the pooled vector:
    a dense layer, an activation, an optional layer norm, and a second layer with one output.
    """

    activation: Literal["tanh", "silu", "gelu", "gelu_tanh", "relu2"]
    bias: bool  # the dense layer has a bias
    norm: bool
    squashes: bool  # the score is the sigmoid of the output


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Settings of a text encoder. Each token attends to all tokens of the text; in layers with a
    window, it attends to window - 1 tokens before it and as many after it. Pooling combines the
    final states of the tokens into one vector.

    If a checkpoint does not state how to pool, the defaults apply: mean pooling, and vectors of
    unit length.
    """

    num_token_types: int  # 0: the model has no token types
    max_tokens: int  # max tokens of one text; at most the length of the position table
    # The stored position table has this many rows before the row of the first token.
    first_position: int = 0
    pooling: Literal["mean", "cls", "last"] = "mean"
    normalizes: bool = True  # whether the resulting vectors are scaled to unit length
    head: ScoreHead | None = None  # None: the result is the pooled vector


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Settings of a mixture of experts, which takes the place of the MLP in some or all layers."""

    count: int
    per_token: int  # each token runs through this many experts
    size: int  # intermediate size of one expert
    # How the router's logits become weights: by softmax over all experts, by softmax over the
    # chosen experts only, or by a sigmoid for each expert.
    scoring: Literal["softmax", "softmax_chosen", "sigmoid"] = "softmax"
    renormalizes: bool = False  # the weights of the chosen experts are divided by their sum
    scale: float = 1.0  # multiplies the weights of the chosen experts
    # Experts form this many groups of equal size. A token chooses among the experts of its best
    # `groups_per_token` groups.
    groups: int = 1
    groups_per_token: int = 1
    # What ranks a group: its best expert's score, or the sum of the best two.
    group_score: Literal["best", "best_two"] = "best"
    correction: bool = False  # a learned vector is added to the scores that choose experts
    router_bias: bool = False
    bias: bool = False  # the matrices of the experts have biases
    shared_size: int = 0  # intermediate size of the shared expert; 0: there is none
    shared_gate: bool = False  # a sigmoid per token multiplies the shared expert's output


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Settings of multi-head latent attention (MLA). Keys and values of all heads are computed from
    one vector per token, the latent. One rotated key is shared by all heads.

    The engine caches, per token and layer, only the latent and the rotated key. Queries are
    multiplied by the key matrices, so that they score latents. The sum of latents is multiplied by
    the value matrices. So in `ModelConfig`, there is one KV head, and a head of the queries has
    `kv_rank + rope_dim` values.
    """

    kv_rank: int  # size of the latent
    q_rank: int | None  # queries are computed from a vector of this size; None: from the input
    nope_dim: int  # values of a head's key that are not rotated
    rope_dim: int  # values of a head's key that are rotated
    value_dim: int  # values of a head's output
    # Only with YaRN: scores are multiplied by the square of 1 + 0.1 * mscale * ln(factor).
    mscale: float = 0.0


# Epsilon of the norms of the latent and of the vector that queries are computed from. No file
# states it.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ between the layers of a model."""

    window: int | None  # a token attends to this many positions, itself included; None: to all
    rope: RopeConfig | None  # None: this layer does not rotate queries and keys
    experts: bool  # the MLP is a mixture of experts
    # What combines tokens: attention, a short convolution, Mamba-2, Gated DeltaNet, or nothing.
    mixer: Mixer = "attention"
    mlp: bool = True  # False: the layer has no MLP


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyperparameters of a transformer."""

    family: str  # registry name: "llama", "gpt2", "olmo2", ...
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm_eps: float
    tie_embeddings: bool
    rope: RopeConfig | None  # None: learned absolute positions, or ALiBi
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    # What a layer's norms normalize. "input": the input of attention and MLP (pre-norm). "output":
    # the output of attention and MLP, before it is added to the residual stream. "both": the input
    # and the output. "sum": the residual stream after this addition (post-norm).
    norm_placement: Literal["input", "output", "both", "sum"] = "input"
    # Attention and MLP both read the residual stream before the layer, and both are added to it.
    # They read the same normalized input ("shared"), or each has a norm of its own ("own").
    parallel: Literal["shared", "own"] | None = None
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"] = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    # How queries and keys are normalized: an RMS norm for each head ("head"), one RMS norm over all
    # heads together ("whole"), or not at all (None).
    qk_norm: Literal["head", "whole"] | None = None
    sliding_window: int | None = None
    layers: tuple[LayerConfig, ...] = ()  # one per layer; empty: all layers are alike
    experts: ExpertsConfig | None = None
    attention_softcap: float | None = None  # bounds scores: cap * tanh(score / cap)
    logits_softcap: float | None = None
    attention_sinks: bool = False  # each head has a learned logit that only adds to softmax's sum
    alibi_bias: float | None = None  # the largest slope exponent of ALiBi; None: no ALiBi
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0  # multiplies the embeddings
    residual_multiplier: float = 1.0  # multiplies the outputs of attention and MLP
    # Attention scores are multiplied by this number. None means 1 / sqrt(head_dim).
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0  # the logits are divided by this number
    encoder: EncoderConfig | None = None  # None: the model is a decoder
    latent: LatentConfig | None = None  # None: each KV head has keys and values of its own
    vision: VisionConfig | None = None  # the image encoder; None: the model reads only text
    state: StateConfig | None = None  # None: no layer keeps a state
    attention_gate: bool = False  # a sigmoid gate multiplies the output of attention

    @property
    def num_params(self) -> int:
        """Number of weights in matrices and embeddings. Norms and biases are not counted."""
        attention = self._attention_params
        mlp = self.hidden_size * self.intermediate_size * (3 if self.gated_mlp else 2)
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        experts, sparse = 0, 0
        if self.experts is not None:
            width = self.experts.count * self.experts.size + self.experts.shared_size
            experts = self.hidden_size * (3 * width + self.experts.count + self.experts.shared_gate)
            sparse = sum(self.layer(index).experts for index in range(self.num_layers))
        layers = [self.layer(index) for index in range(self.num_layers)]
        dense = sum(each.mlp for each in layers) - sparse
        mixers = len(self.attention_layers) * attention
        if self.state is not None:
            mixers += sum(self.state.num_params(each.mixer, self.hidden_size) for each in layers)
        return mixers + dense * mlp + sparse * experts + tables

    @property
    def _attention_params(self) -> int:
        """Number of weights in the matrices of a layer's attention."""
        latent, hidden, heads = self.latent, self.hidden_size, self.num_heads
        if latent is None:
            gates = heads if self.attention_gate else 0
            return hidden * self.head_dim * (2 * (heads + self.num_kv_heads) + gates)
        queries = heads * (latent.nope_dim + latent.rope_dim)
        q = hidden * queries
        if latent.q_rank is not None:
            q = latent.q_rank * (hidden + queries)
        expanded = heads * latent.kv_rank * (latent.nope_dim + latent.value_dim)
        return q + hidden * self.head_dim + expanded + hidden * heads * latent.value_dim

    @property
    def attention_width(self) -> int:
        """Number of values that the heads of a layer put out together, before the projection."""
        size = self.head_dim if self.latent is None else self.latent.value_dim
        return self.num_heads * size

    @property
    def attention_scale(self) -> float:
        """The factor that multiplies attention scores."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        latent, rope = self.latent, self.rope
        if latent is None:
            return float(self.head_dim**-0.5)
        stretch = math.log(rope.factor) if rope is not None and rope.factor > 1 else 0.0
        magnitude = 1 + 0.1 * latent.mscale * stretch
        return magnitude * magnitude / math.sqrt(latent.nope_dim + latent.rope_dim)

    def layer(self, index: int) -> LayerConfig:
        if self.layers:
            return self.layers[index]
        return LayerConfig(self.sliding_window, self.rope, self.experts is not None)

    def _layers_with(self, *mixers: Mixer) -> list[int]:
        if not self.layers:  # all are alike
            return [*range(self.num_layers)] if "attention" in mixers else []
        return [i for i, layer in enumerate(self.layers) if layer.mixer in mixers]

    @property
    def attention_layers(self) -> list[int]:
        """The numbers of the layers that have attention."""
        return self._layers_with("attention")

    @property
    def state_layers(self) -> list[int]:
        return self._layers_with(*STATE_MIXERS)

    @property
    def state_floats(self) -> int:
        """The number of float32 values that the state of a sequence has, in all layers."""
        state, mixers = self.state, (self.layer(index).mixer for index in self.state_layers)
        return sum(state.sizes(each, self.hidden_size).state for each in mixers) if state else 0

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct RoPE settings of the layers, each once, in the order in which layers first
        use them.
        """
        if not self.layers:
            return () if self.rope is None else (self.rope,)
        each = (self.layer(index).rope for index in self.attention_layers)
        return tuple(dict.fromkeys(rope for rope in each if rope is not None))

    @property
    def learned_positions(self) -> bool:
        return self.rope is None and self.alibi_bias is None and self.state is None

    @property
    def has_head(self) -> bool:
        """Whether the LM head has its own matrix, instead of using the token embeddings."""
        return not self.tie_embeddings

    @property
    def window(self) -> int | None:
        """The largest sliding window of all layers. None: no layer has one."""
        windows = (self.layer(index).window for index in range(self.num_layers))
        return max((window for window in windows if window is not None), default=None)

    def cache_places(self, has_window_group: bool) -> tuple[tuple[int, int], ...]:
        """For each layer, which KV cache it uses, and its index among the layers of that cache. If
        there is a window group, the layers with a sliding window use cache 1. All others use 0. A
        layer without attention has the place (-1, -1).
        """
        places, counts = [], [0, 0]
        for index in range(self.num_layers):
            if self.layer(index).mixer != "attention":
                places.append((-1, -1))
                continue
            cache = int(has_window_group and self.layer(index).window is not None)
            places.append((cache, counts[cache]))
            counts[cache] += 1
        return tuple(places)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        if self.encoder is not None:
            return 0  # an encoder has no KV cache
        values = self.kv_parts * self.num_kv_heads * self.head_dim
        return values * len(self.attention_layers) * bytes_per_value

    @property
    def kv_parts(self) -> int:
        """How many vectors the KV cache has per token and KV head: two, key and value, or only the
        key, if the value is a part of the key.
        """
        return 2 if self.latent is None else 1


class Architecture(Protocol):
    """A model family: a `family.Family`, or a module that defines these names."""

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names that this family has in the "architectures" list of a config.json."""
        ...

    @property
    def gguf_names(self) -> tuple[str, ...]:
        """Names that this family has in GGUF files, under the key general.architecture."""
        ...

    def config_from_hf(self, config: Mapping[str, Any]) -> ModelConfig: ...

    def config_from_gguf(self, metadata: Mapping[str, Any]) -> ModelConfig: ...

    def tensors(self, config: ModelConfig) -> tuple[TensorSpec, ...]: ...


Value = TypeVar("Value")
_MISSING: Any = object()


class Reader:
    """Reads keys of a config.json or of GGUF metadata and checks their types. A missing key or a
    value of the wrong type raises an error that names the key.
    """

    def __init__(self, source: Mapping[str, Any], where: str) -> None:
        self._source = source
        self._where = where

    @property
    def source(self) -> Mapping[str, Any]:
        return self._source

    def has(self, key: str) -> bool:
        """Whether the key exists. A key whose value is null also counts."""
        return key in self._source

    def read(self, kind: type[Value], key: str, default: Any = _MISSING) -> Value:
        value = self._source.get(key)
        if value is None:
            if default is _MISSING:
                raise ModelFormatError(f"{self._where} lacks the required key '{key}'")
            return default  # type: ignore[no-any-return]
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            value = self._finite(value, key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelFormatError(
                f"{self._where}: key '{key}' must be {kind.__name__}, found {type(value).__name__}"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ModelFormatError(f"{self._where}: key '{key}' must fit into 64 bits")
        return value

    def _finite(self, value: float, key: str) -> float:
        if not abs(value) <= sys.float_info.max:
            raise ModelFormatError(f"{self._where}: key '{key}' must be a finite number")
        return float(value)
