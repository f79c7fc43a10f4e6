"""GPT-2: learned positions, layer norms, a plain feed-forward half, biases everywhere."""

from tinygrad import Tensor

from engine.backends.custom.frameworks.tinygrad.kernels.rows import take_rows
from engine.backends.custom.frameworks.tinygrad.layers.linear import Params
from engine.backends.custom.frameworks.tinygrad.layers.mlp import mlp
from engine.backends.custom.frameworks.tinygrad.layers.norm import layer_norm
from engine.backends.custom.frameworks.tinygrad.models.base import Family


def embed(params: Params, token_ids: Tensor, positions: Tensor) -> Tensor:
    tokens = take_rows(params["embed"]["weight"], token_ids)
    return tokens + take_rows(params["position"]["weight"], positions)


FAMILY = Family(embed=embed, norm=layer_norm, mlp=mlp)
