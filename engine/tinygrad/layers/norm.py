"""Norms over the last dimension. Mean and variance are computed in float32 for all dtypes."""

from tinygrad import Tensor

from engine.tinygrad.layers.linear import Params


def rms_norm(params: Params, x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * (wide.square().mean(axis=-1, keepdim=True) + eps).rsqrt()
    return normed.cast(x.dtype) * params["weight"]


def layer_norm(params: Params, x: Tensor, eps: float) -> Tensor:
    normed = x.float().layernorm(eps=eps)
    scaled = normed.cast(x.dtype) * params["weight"]
    return scaled + params["bias"] if "bias" in params else scaled
