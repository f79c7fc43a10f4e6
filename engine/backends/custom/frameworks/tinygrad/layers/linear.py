"""Matrix products. A parameter is a dictionary with "weight", (out, in), and perhaps "bias"."""

from tinygrad import Tensor

Params = dict  # names to tensors or to further ones


def linear(params: Params, x: Tensor) -> Tensor:
    return x.linear(params["weight"].transpose(), params.get("bias"))
