"""Loads a checkpoint's weights into a parameter tree, for frameworks with functional layers.

Dots in names become levels of the tree, numbers become lists:
`tree["layers"][3]["attn"]["q"]["weight"]`. Each weight is dequantized, placed and dropped before
the next one is read, so the host holds at most one float32 tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.architectures.base import ModelConfig
from engine.core.errors import ModelFormatError

ROPE_FACTORS = "rope.factors"
FUSED = ".attn.qkv."  # a matrix with the rows of q, then k, then v


class Weight(Protocol):
    def numpy(self) -> NDArray[np.float32]:
        """The dequantized tensor, (out, in) for a matrix."""
        ...


def check_decoder(config: ModelConfig, framework: str) -> None:
    """Rejects encoders: the framework runs decoders only."""
    if config.encoder is not None or config.norm_placement == "sum":
        raise ModelFormatError(
            f"the {framework} framework has no decoder for family '{config.family}'"
        )


def rope_factors(weights: Mapping[str, Weight]) -> NDArray[np.float32] | None:
    """The frequency factors of RoPE, if the checkpoint has them."""
    factors = weights.get(ROPE_FACTORS)
    return None if factors is None else factors.numpy()


def parameter_tree(
    weights: Mapping[str, Weight],
    decode: Callable[[Weight], Any],
    place: Callable[[str, Any], Any],
) -> dict[str, Any]:
    """`decode` makes an array of any library; `place` makes the tree's leaf from name and array."""
    tree: dict[str, Any] = {}
    for name, weight in weights.items():
        if name == ROPE_FACTORS:
            continue
        for part, values in _parts(name, decode(weight)):
            *path, kind = part.split(".")
            branch = tree
            for key in path:
                branch = branch.setdefault(key, {})
            branch[kind] = place(part, values)
    tree["layers"] = [tree["layers"][str(i)] for i in range(len(tree["layers"]))]
    return tree


def _parts(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    if FUSED not in name:
        yield name, values
        return
    size = len(values) // 3
    for index, part in enumerate("qkv"):
        rows = values[index * size : (index + 1) * size]
        yield name.replace(FUSED, f".attn.{part}."), rows
