"""A family's model with its weights from a checkpoint, one tensor at a time.

Each weight is decoded, put on the device, cast there and dropped, so the host holds one float32
tensor at most. Names with dots become the levels of a tree; numbers become lists.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor
from tinygrad.dtype import DType

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.tinygrad.layers.linear import Params
from engine.backends.custom.frameworks.tinygrad.models import gpt2, llama, qwen2, qwen3
from engine.backends.custom.frameworks.tinygrad.models.base import Family, Model
from engine.backends.custom.ir.rotary import rotary_tables
from engine.core.errors import ModelFormatError

FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
}
ROPE_FACTORS = "rope.factors"
FUSED = ".attn.qkv."  # a matrix whose rows are those of q, then k, then v


class Weight(Protocol):
    def numpy(self) -> NDArray[np.float32]:
        """The decoded tensor, (out, in) for a matrix."""
        ...


def load_model(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    max_seq_len: int,
    dtype: DType,
    device: str,
) -> Model:
    if config.family not in FAMILIES:
        raise ModelFormatError(
            f"the tinygrad framework has no model for family '{config.family}'; "
            f"it has {', '.join(sorted(FAMILIES))}"
        )
    rotary = None
    if config.rope is not None:
        factors = weights.get(ROPE_FACTORS)
        given = None if factors is None else factors.numpy()
        rotary = rotary_tables(config.rope, max_seq_len, given)
    params: Params = {}
    for name, weight in weights.items():
        for part, values in _parts(name, weight):
            tensor = Tensor(values, device=device).cast(dtype).contiguous().realize()
            _insert(params, part.split("."), tensor)
    params["layers"] = [params["layers"][str(i)] for i in range(config.num_layers)]
    return Model(config, FAMILIES[config.family], params, rotary)


def _parts(name: str, weight: Weight) -> Iterator[tuple[str, NDArray[np.float32]]]:
    if name == ROPE_FACTORS:
        return
    values = weight.numpy()
    if FUSED not in name:
        yield name, values
        return
    for part, rows in zip("qkv", np.split(values, 3), strict=True):
        yield name.replace(FUSED, f".attn.{part}."), rows


def _insert(tree: Params, path: list[str], value: Tensor) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
