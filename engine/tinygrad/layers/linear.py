"""Matmul. Its parameters are a dictionary with "weight", (out, in), and an optional "bias"."""

from tinygrad import Tensor

Params = dict  # names to tensors or to nested dictionaries


def linear(params: Params, x: Tensor) -> Tensor:
    return x.linear(params["weight"].transpose(), params.get("bias"))
