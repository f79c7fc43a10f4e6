"""The attributes that graph nodes have in addition to inputs and weights, such as head counts. Each
kind of op has its own struct. `attribute_fault` checks the types of the fields.
"""

from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from engine.ir.plan import Activation


class NoAttributes(msgspec.Struct, frozen=True):
    pass


class Lookup(msgspec.Struct, frozen=True):
    scale: float = 1.0  # the rows from the table are multiplied by this number
    types: bool = False  # only of `embed_positions`: its last table is that of token types


class Scale(msgspec.Struct, frozen=True):
    factor: float


class Softcap(msgspec.Struct, frozen=True):
    cap: float


class Normalize(msgspec.Struct, frozen=True):
    eps: float


class HeadNorm(msgspec.Struct, frozen=True):
    heads: int
    head_dim: int
    eps: float


class Rope(msgspec.Struct, frozen=True):
    heads: int
    head_dim: int
    dim: int  # the first `dim` values of a head are rotated
    table: int = 0  # index of the RoPE table in `ModelConfig.ropes`


class Columns(msgspec.Struct, frozen=True):
    start: int
    stop: int


class KvWrite(msgspec.Struct, frozen=True):
    layer: int
    kv_heads: int
    head_dim: int


class AttentionAttributes(msgspec.Struct, frozen=True):
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # sliding window: a token attends to this many positions, itself included
    softcap: float | None = None
    alibi_bias: float | None = None  # the largest slope exponent of ALiBi
    sinks: bool = False  # the node's weight has one logit per head
    centered: bool = False  # the window reaches as far after the token as before it
    # Above 0: the cache has no values. The first `latent` values of a key are its value.
    latent: int = 0

    @property
    def value_dim(self) -> int:
        return self.latent or self.head_dim


class HeadLinear(msgspec.Struct, frozen=True):
    """A matmul with a matrix per head. Its weight is (heads, out, in).

    If `rope_dim` is above 0, the last `rope_dim` values of each head are not multiplied. They are
    rotated and follow the results of the head. The inputs are then the rows, the cosines and the
    sines.
    """

    heads: int
    rope_dim: int = 0
    table: int = 0  # index of the RoPE table in `ModelConfig.ropes`


class LatentWrite(msgspec.Struct, frozen=True):
    """Normalizes the latent of each token, rotates its key, and writes both to the KV cache.

    A row of the first input has `rank` values of the latent, then `rope_dim` values of the key.
    Order of the inputs: the rows, the cosines, the sines, the KV cache, the write slots. The weight
    is the latent's norm.
    """

    layer: int
    rank: int
    rope_dim: int
    eps: float
    table: int = 0  # index of the RoPE table in `ModelConfig.ropes`


class Projection(msgspec.Struct, frozen=True):
    """A matmul with the ops that may be fused into it: norm, bias, activation, scale, residual.

    The node's weights are, in this order: the norm's weight and bias, `parts` matrices, and their
    biases. Its inputs are the activations and, if `residual`, the residual stream to add to.
    """

    parts: int = 1
    norm: Literal["none", "rms", "layer"] = "none"
    norm_bias: bool = False
    eps: float = 0.0
    has_bias: bool = False
    activation: Activation = "none"
    gated: bool = False
    residual: bool = False
    scale: float = 1.0  # the result is multiplied by this number before the residual is added
    softcap: float | None = None  # bounds the result: softcap * tanh(result / softcap)

    @property
    def norm_weights(self) -> int:
        return 0 if self.norm == "none" else 1 + self.norm_bias


class RopeWrite(msgspec.Struct, frozen=True):
    """Normalizes and rotates q and k, and writes k and v to the KV cache.

    The node's inputs are, in this order: qkv, the cosines and sines if the model uses RoPE, the KV
    cache, and the write slots. Its weights are the norm of q and the norm of k, if the model has
    them.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int  # RoPE rotates this many values of each head; 0 if the model has no RoPE
    q_norm: bool
    k_norm: bool
    eps: float
    whole_norm: bool = False  # True: one norm over all heads of a token. False: a norm per head.
    table: int = 0  # index of the RoPE table in `ModelConfig.ropes`


class Experts(msgspec.Struct, frozen=True):
    """A mixture of experts without its router.

    Order of the node's weights: gate, up, down, then their biases. The first dimension of each
    counts experts. Order of the inputs: the token rows, the routing weights (one per expert, 0 for
    those not chosen), then the residual stream to add to.
    """

    per_token: int
    activation: Activation
    has_bias: bool = False
    residual: bool = False
    scale: float = 1.0  # multiplies the result before the residual is added


def attribute_fault(attributes: Any, kind: type) -> str | None:
    """Checks that a node's attributes are of type `kind` and that their fields have the declared
    types. Returns an error message, or None if there is no error.
    """
    hints = _hints(kind)
    if type(attributes) is not kind:
        return f"attributes must be {kind.__name__}, found {type(attributes).__name__}"
    for name, hint in hints.items():
        value = getattr(attributes, name)
        if not _fits(value, hint):
            return f"attribute '{name}' must be {_name(hint)}, found {value!r}"
    return None


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return type(value) is hint


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
