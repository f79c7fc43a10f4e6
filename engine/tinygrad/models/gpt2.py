"""GPT-2's learned position embeddings. All other parts of the model are in `base.py`."""

from tinygrad import Tensor

from engine.tinygrad.kernels.rows import take_rows
from engine.tinygrad.layers.linear import Params


def add_positions(params: Params, x: Tensor, positions: Tensor) -> Tensor:
    """Adds the position embeddings to the token embeddings: x (T, D), positions (T,) -> (T, D)"""
    return x + take_rows(params["position"]["weight"], positions)
