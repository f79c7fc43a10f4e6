"""The MLP of a layer: gated in Llama and its descendants, without a gate in GPT-2."""

from collections.abc import Callable

from tinygrad import Tensor

from engine.backends.custom.frameworks.tinygrad.layers.linear import Params, linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": Tensor.silu,
    "gelu": lambda x: x * 0.5 * (1 + (x * 0.5**0.5).erf()),
    "gelu_tanh": Tensor.gelu,
}


def gated_mlp(params: Params, x: Tensor, activation: str) -> Tensor:
    gate = ACTIVATIONS[activation](linear(params["gate"], x))
    return linear(params["down"], (gate * linear(params["up"], x)).contiguous())


def mlp(params: Params, x: Tensor, activation: str) -> Tensor:
    return linear(params["down"], ACTIVATIONS[activation](linear(params["up"], x)).contiguous())
