"""The decoder of all model families, as functions of the model's parameters.

Serving calls `decode` with a function `attend` that reads and writes the paged cache. Parity tests
call `forward_sequence`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor

from engine.architectures.base import LayerConfig, ModelConfig, RopeConfig
from engine.runners.scoring import Scoring, scoring_of
from engine.runtime.model_runner import F32
from engine.tinygrad.kernels.attention import PerHead
from engine.tinygrad.kernels.rows import take_rows
from engine.tinygrad.layers.attention import (
    causal_attention,
    heads,
    outputs,
)
from engine.tinygrad.layers.experts import mixture
from engine.tinygrad.layers.linear import Params, linear
from engine.tinygrad.layers.mlp import gated_mlp, mlp
from engine.tinygrad.layers.norm import layer_norm, rms_norm
from engine.tinygrad.layers.rotary import Rotation
from engine.tinygrad.models.gpt2 import add_positions

# A function that attends in one layer. It gets the layer's number, scoring rules, per-head values,
# queries (T, N, H), keys (T, K, H) and values (T, K, U). It returns the attention output (T, N, U).
Attend = Callable[[int, Scoring, PerHead, Tensor, Tensor, Tensor], Tensor]
Rotations = Mapping[RopeConfig, Rotation]  # by the RoPE setting of a layer


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    config: ModelConfig
    params: Params
    # For each RoPE setting of the layers: the cosines and the sines for every position,
    # (max_seq_len, dim / 2) each.
    rotary: Mapping[RopeConfig, tuple[F32, F32]]
    slopes: Tensor | None  # (N,) float32, the slopes of ALiBi


def block(model: Model, index: int, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
    """One layer: attention, then MLP. Both add to the residual stream x (T, D)."""
    config, params = model.config, model.params["layers"][index]
    layer = config.layer(index)
    rotation = None if layer.rope is None else rotations[layer.rope]
    read = entering(config, params, "attn", x)
    qkv = heads(params["attn"], config, read, rotation)
    per_head = PerHead(model.slopes, params["attn"].get("sinks"))
    attended = attend(index, scoring_of(config, layer), per_head, *qkv)
    half = outputs(params["attn"], attended)
    after = merged(config, params, "attn", x, half)
    if config.parallel != "shared":
        read = entering(config, params, "mlp", after if config.parallel is None else x)
    return merged(config, params, "mlp", after, feed_forward(config, layer, params, read))


def feed_forward(config: ModelConfig, layer: LayerConfig, params: Params, x: Tensor) -> Tensor:
    if layer.experts:
        assert config.experts is not None, config
        return mixture(params, config.experts, config.activation, x)
    return (gated_mlp if config.gated_mlp else mlp)(params["mlp"], x, config.activation)


def entering(config: ModelConfig, params: Params, part: str, x: Tensor) -> Tensor:
    """What attention ("attn") or MLP ("mlp") reads: x, normalized if the model has input norms."""
    has_norm = config.norm_placement in ("input", "both")
    return norm(config, params[f"{part}_norm"], x) if has_norm else x


def merged(config: ModelConfig, params: Params, part: str, x: Tensor, half: Tensor) -> Tensor:
    """Adds `half`, the output of attention ("attn") or MLP ("mlp"), to the residual stream `x`. If
    the model has output norms, `half` is normalized first.
    """
    if config.norm_placement == "output":
        half = norm(config, params[f"{part}_norm"], half.contiguous())
    if config.norm_placement == "both":
        half = norm(config, params[f"{part}_out_norm"], half.contiguous())
    if config.residual_multiplier != 1:
        half = half * config.residual_multiplier
    return (x + half).contiguous()


def norm(config: ModelConfig, params: Params, x: Tensor) -> Tensor:
    return (rms_norm if config.norm == "rms" else layer_norm)(params, x, config.norm_eps)


def embed(model: Model, token_ids: Tensor, positions: Tensor) -> Tensor:
    """The input of the first layer: token ids (T,) and positions (T,) -> embeddings (T, D)"""
    config, params = model.config, model.params
    x = take_rows(params["embed"]["weight"], token_ids)
    if config.embedding_multiplier != 1:
        x = x * config.embedding_multiplier
    return add_positions(params, x, positions) if config.learned_positions else x


def decode(
    model: Model,
    token_ids: Tensor,
    positions: Tensor,
    rotations: Rotations,
    attend: Attend,
) -> list[Tensor]:
    """Runs all layers. Returns a list of the residual stream (T, D) before the first layer and
    after each layer.
    """
    states = [embed(model, token_ids, positions)]
    for layer in range(model.config.num_layers):
        states.append(block(model, layer, states[-1], rotations, attend))
    return states


def final_norm(model: Model, x: Tensor) -> Tensor:
    return norm(model.config, model.params["norm"], x)


def head_logits(model: Model, hidden: Tensor) -> Tensor:
    """Hidden states after the final norm (R, D) -> logits (R, V) float32"""
    params, scaling = model.params, model.config.logits_scaling
    logits = linear(params["head" if "head" in params else "embed"], hidden).float()
    if scaling != 1:
        logits = logits / scaling
    cap = model.config.logits_softcap
    return logits if cap is None else (logits / cap).tanh() * cap


def forward_sequence(model: Model, token_ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """The logits (T, V) of one sequence of token ids, and the residual streams that `decode`
    returns.
    """
    device = model.params["norm"]["weight"].device
    positions = np.arange(len(token_ids), dtype=np.int32)
    ids, places = (Tensor(x, device=device) for x in (np.array(token_ids, np.int32), positions))
    rotations = {
        rope: Rotation(*(Tensor(table[positions], device=device) for table in tables))
        for rope, tables in model.rotary.items()
    }

    def attend(
        layer: int, scoring: Scoring, per_head: PerHead, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        return causal_attention(q, k, v, scoring, per_head)

    states = decode(model, ids, places, rotations, attend)
    return head_logits(model, final_norm(model, states[-1])), states
