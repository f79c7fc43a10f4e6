"""Llama 1 to 3, and what shares its block: Mistral (a sliding window) and SmolLM."""

from tinygrad import Tensor

from engine.backends.custom.frameworks.tinygrad.kernels.rows import take_rows
from engine.backends.custom.frameworks.tinygrad.layers.linear import Params
from engine.backends.custom.frameworks.tinygrad.layers.mlp import gated_mlp
from engine.backends.custom.frameworks.tinygrad.layers.norm import rms_norm
from engine.backends.custom.frameworks.tinygrad.models.base import Family


def embed(params: Params, token_ids: Tensor, positions: Tensor) -> Tensor:
    return take_rows(params["embed"]["weight"], token_ids)


FAMILY = Family(embed=embed, norm=rms_norm, mlp=gated_mlp)
