"""The MLP of a layer: gated in Llama and its descendants, without a gate in GPT-2."""

from collections.abc import Callable

from tinygrad import Tensor

from engine.runners.parameters import SWIGLU_ALPHA, SWIGLU_LIMIT
from engine.tinygrad.layers.linear import Params, linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": Tensor.silu,
    "gelu": lambda x: x * 0.5 * (1 + (x * 0.5**0.5).erf()),
    "gelu_tanh": Tensor.gelu,
    "relu2": lambda x: x.relu().square(),
}


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """The input of the down projection, from the outputs of the gate and up projections."""
    if activation == "swiglu_oai":
        gate, up = gate.minimum(SWIGLU_LIMIT), up.clip(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * (SWIGLU_ALPHA * gate).sigmoid() * (up + 1)
    return ACTIVATIONS[activation](gate) * up


def gated_mlp(params: Params, x: Tensor, activation: str) -> Tensor:
    gate, up = linear(params["gate"], x), linear(params["up"], x)
    return linear(params["down"], gated(activation, gate, up).contiguous())


def mlp(params: Params, x: Tensor, activation: str) -> Tensor:
    return linear(params["down"], ACTIVATIONS[activation](linear(params["up"], x)).contiguous())
