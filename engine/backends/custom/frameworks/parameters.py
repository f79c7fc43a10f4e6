"""A checkpoint's weights for frameworks whose layers are functions of their parameters.

Names with dots become the levels of a tree, numbers become lists:
`tree["layers"][3]["attn"]["q"]["weight"]`. A weight is decoded, placed and dropped before the next
one is read, so the host holds one float32 tensor at most.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.architectures.base import ModelConfig
from engine.core.errors import ModelFormatError

ROPE_FACTORS = "rope.factors"
FUSED = ".attn.qkv."  # a matrix whose rows are those of q, then k, then v


class Weight(Protocol):
    def numpy(self) -> NDArray[np.float32]:
        """The decoded tensor, (out, in) for a matrix."""
        ...


def check_decoder(config: ModelConfig, framework: str) -> None:
    """Refuse what is none: a framework's one model is a decoder."""
    if config.encoder is not None or config.norm_placement == "sum":
        raise ModelFormatError(
            f"the {framework} framework has no decoder for family '{config.family}'"
        )


def rope_factors(weights: Mapping[str, Weight]) -> NDArray[np.float32] | None:
    """Of a rotary rule that comes with the checkpoint."""
    factors = weights.get(ROPE_FACTORS)
    return None if factors is None else factors.numpy()


def parameter_tree(
    weights: Mapping[str, Weight],
    decode: Callable[[Weight], Any],
    place: Callable[[str, Any], Any],
) -> dict[str, Any]:
    """`decode` gives an array of any library, `place` what the tree holds of it, by its name."""
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
