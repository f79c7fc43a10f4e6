"""The decoder of all model families, as functions of the model's parameters.

Serving calls `decode` with a function `attend` that reads and writes the paged cache. Parity tests
call `forward_sequence`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.tinygrad.kernels.rows import take_rows
from engine.backends.custom.frameworks.tinygrad.layers.attention import causal_attention, heads
from engine.backends.custom.frameworks.tinygrad.layers.linear import Params, linear
from engine.backends.custom.frameworks.tinygrad.layers.mlp import gated_mlp, mlp
from engine.backends.custom.frameworks.tinygrad.layers.norm import layer_norm, rms_norm
from engine.backends.custom.frameworks.tinygrad.layers.rotary import Rotation
from engine.backends.custom.frameworks.tinygrad.models.gpt2 import add_positions
from engine.backends.custom.runtime.model_runner import F32

# A function that attends in one layer. It gets the layer's number, queries (T, N, H), keys and
# values (T, K, H), and returns the attention output (T, N, H).
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    config: ModelConfig
    params: Params
    # The cosines and the sines of RoPE for every position, (max_seq_len, dim / 2) each. None: the
    # model has learned position embeddings instead of RoPE.
    rotary: tuple[F32, F32] | None


def block(model: Model, layer: int, x: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
    """One layer: attention, then MLP. Both add to the residual stream x (T, D)."""
    config, params = model.config, model.params["layers"][layer]
    read = norm(config, params["attn_norm"], x) if config.norm_placement == "input" else x
    attended = attend(layer, *heads(params["attn"], config, read, rotation))
    half = linear(params["attn"]["o"], attended.reshape(x.shape[0], -1))
    x = merged(config, params["attn_norm"], x, half)
    read = norm(config, params["mlp_norm"], x) if config.norm_placement == "input" else x
    half = (gated_mlp if config.gated_mlp else mlp)(params["mlp"], read, config.activation)
    return merged(config, params["mlp_norm"], x, half)


def merged(config: ModelConfig, params: Params, x: Tensor, half: Tensor) -> Tensor:
    """Adds `half`, the output of attention or MLP, to the residual stream `x`. If the model has
    output norms, `half` is normalized first. `params` are the parameters of this norm.
    """
    if config.norm_placement == "output":
        half = norm(config, params, half.contiguous())
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
    return x if config.rope is not None else add_positions(params, x, positions)


def decode(
    model: Model,
    token_ids: Tensor,
    positions: Tensor,
    rotation: Rotation | None,
    attend: Attend,
) -> list[Tensor]:
    """Runs all layers. Returns a list of the residual stream (T, D) before the first layer and
    after each layer.
    """
    states = [embed(model, token_ids, positions)]
    for layer in range(model.config.num_layers):
        states.append(block(model, layer, states[-1], rotation, attend))
    return states


def final_norm(model: Model, x: Tensor) -> Tensor:
    return norm(model.config, model.params["norm"], x)


def head_logits(model: Model, hidden: Tensor) -> Tensor:
    """Hidden states after the final norm (R, D) -> logits (R, V) float32"""
    params, scaling = model.params, model.config.logits_scaling
    logits = linear(params["head" if "head" in params else "embed"], hidden).float()
    return logits if scaling == 1 else logits / scaling


def forward_sequence(model: Model, token_ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """The logits (T, V) of one sequence of token ids, and the residual streams that `decode`
    returns.
    """
    device = model.params["norm"]["weight"].device
    positions = np.arange(len(token_ids), dtype=np.int32)
    ids, places = (Tensor(x, device=device) for x in (np.array(token_ids, np.int32), positions))
    rotation = None
    if model.rotary is not None:
        rotation = Rotation(*(Tensor(table[positions], device=device) for table in model.rotary))

    config = model.config

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, config.sliding_window, config.attention_scale)

    states = decode(model, ids, places, rotation, attend)
    return head_logits(model, final_norm(model, states[-1])), states
