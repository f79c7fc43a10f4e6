"""Loads a checkpoint's weights into a parameter tree, for frameworks with functional layers.

The dots of a weight's name separate the levels of the tree, and numbers are list indices:
"layers.3.attn.q.weight" is `tree["layers"][3]["attn"]["q"]["weight"]`. Each weight is dequantized,
copied to its device and freed before the next weight is read. So the host holds at most one float32
tensor at a time.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.architectures.base import ModelConfig
from engine.core.errors import ModelFormatError

ROPE_FACTORS = "rope.factors"


class Weight(Protocol):
    def numpy(self) -> NDArray[np.float32]:
        """The dequantized tensor, (out, in) for a matrix."""
        ...


def check_decoder(config: ModelConfig, framework: str) -> None:
    """Raises `ModelFormatError` if the model is a text encoder, because the framework's decoder
    cannot run it.
    """
    if config.encoder is not None or config.norm_placement == "sum":
        raise ModelFormatError(
            f"the {framework} framework has no decoder for family '{config.family}'"
        )


def rope_factors(weights: Mapping[str, Weight]) -> NDArray[np.float32] | None:
    """The factors by which RoPE frequencies are divided. None if the checkpoint has no factors."""
    factors = weights.get(ROPE_FACTORS)
    return None if factors is None else factors.numpy()


def parameter_tree(
    weights: Mapping[str, Weight],
    decode: Callable[[Weight], Any],
    place: Callable[[str, Any], Any],
) -> dict[str, Any]:
    """Builds the tree of all weights. `decode` converts a weight to an array. `place` gets the
    weight's name and this array, and returns what the tree stores, such as a copy on a device.
    """
    tree: dict[str, Any] = {}
    for name, weight in weights.items():
        if name == ROPE_FACTORS:
            continue
        *path, kind = name.split(".")
        branch = tree
        for key in path:
            branch = branch.setdefault(key, {})
        branch[kind] = place(name, decode(weight))
    tree["layers"] = [tree["layers"][str(i)] for i in range(len(tree["layers"]))]
    return tree
