"""GPT-2's positions: learned, and added to the embedded tokens. The rest is the decoder's."""

from tinygrad import Tensor

from engine.backends.custom.frameworks.tinygrad.kernels.rows import take_rows
from engine.backends.custom.frameworks.tinygrad.layers.linear import Params


def add_positions(params: Params, x: Tensor, positions: Tensor) -> Tensor:
    """x (T, D), positions (T,) -> (T, D)"""
    return x + take_rows(params["position"]["weight"], positions)
