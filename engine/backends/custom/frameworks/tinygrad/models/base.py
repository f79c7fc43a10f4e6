"""What every decoder shares, as functions of its parameters.

Serving runs `decode` with an `attend` that reads and writes the paged cache; parity tests call
`forward_sequence`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.tinygrad.layers.attention import causal_attention, heads
from engine.backends.custom.frameworks.tinygrad.layers.linear import Params, linear
from engine.backends.custom.frameworks.tinygrad.layers.rotary import Rotation
from engine.backends.custom.runtime.model_runner import F32

# From a layer's number, queries (T, N, H), keys and values (T, K, H): (T, N, H)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """Where families differ."""

    embed: Callable[[Params, Tensor, Tensor], Tensor]  # parameters, token ids, positions: (T, D)
    norm: Callable[[Params, Tensor, float], Tensor]
    mlp: Callable[[Params, Tensor, str], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    config: ModelConfig
    family: Family
    params: Params
    # Cosines and sines of every position, (max_seq_len, dim / 2) each; None: learned positions.
    rotary: tuple[F32, F32] | None


def block(model: Model, layer: int, x: Tensor, turn: Rotation | None, attend: Attend) -> Tensor:
    """Attention, then feed-forward, each on a normalised copy of the stream."""
    config, family, params = model.config, model.family, model.params["layers"][layer]
    normed = family.norm(params["attn_norm"], x, config.norm_eps)
    attended = attend(layer, *heads(params["attn"], config, normed, turn))
    x = (x + linear(params["attn"]["o"], attended.reshape(x.shape[0], -1))).contiguous()
    normed = family.norm(params["mlp_norm"], x, config.norm_eps)
    return (x + family.mlp(params["mlp"], normed, config.activation)).contiguous()


def decode(
    model: Model,
    token_ids: Tensor,
    positions: Tensor,
    turn: Rotation | None,
    attend: Attend,
) -> list[Tensor]:
    """The residual stream before the first block and after each, (T, D)."""
    states = [model.family.embed(model.params, token_ids, positions)]
    for layer in range(model.config.num_layers):
        states.append(block(model, layer, states[-1], turn, attend))
    return states


def final_norm(model: Model, x: Tensor) -> Tensor:
    return model.family.norm(model.params["norm"], x, model.config.norm_eps)


def head_logits(model: Model, hidden: Tensor) -> Tensor:
    """Of normed states: (R, D) -> (R, V) float32"""
    params = model.params
    return linear(params["head" if "head" in params else "embed"], hidden).float()


def forward_sequence(model: Model, token_ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits (T, V) of one sequence, and the states of `decode`."""
    device = model.params["norm"]["weight"].device
    positions = np.arange(len(token_ids), dtype=np.int32)
    ids, places = (Tensor(x, device=device) for x in (np.array(token_ids, np.int32), positions))
    turn = None
    if model.rotary is not None:
        turn = Rotation(*(Tensor(table[positions], device=device) for table in model.rotary))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, model.config.sliding_window)

    states = decode(model, ids, places, turn, attend)
    return head_logits(model, final_norm(model, states[-1])), states
