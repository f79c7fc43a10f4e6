"""GPT-2's learned positions, added to the token embeddings; `base.py` has the rest."""

from tinygrad import Tensor

from engine.backends.custom.frameworks.tinygrad.kernels.rows import take_rows
from engine.backends.custom.frameworks.tinygrad.layers.linear import Params


def add_positions(params: Params, x: Tensor, positions: Tensor) -> Tensor:
    """x (T, D), positions (T,) -> (T, D)"""
    return x + take_rows(params["position"]["weight"], positions)
