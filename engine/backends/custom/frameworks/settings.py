"""How each row of a step chooses, as words for a device that draws by itself.

Settings go under the names of `SamplingInputs`, (R,) but for `keys` (R, 2), which are the noise's,
and for biases (N,). Floats travel by their bits. A step is padded with rows and biases that change
nothing.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.frameworks.layout import Layout
from engine.backends.custom.runtime.host_sampler import row_keys
from engine.backends.custom.runtime.model_runner import DRAW, SamplingInputs

KEEPS = "keeps"  # the slot that a row's token is kept for; a forced one is kept for nobody
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "bias_values")
_BIASES = ("bias_rows", "bias_ids", "bias_values")
_ONE = int(np.float32(1).view(np.int32))  # the bits of 1.0
# What rows that belong to nobody ask for: their likeliest token.
PADS = {
    "slots": 0,
    "temperature": 0,
    "top_k": 0,
    "top_p": _ONE,
    "min_p": 0,
    "repetition": _ONE,
    "presence": 0,
    "frequency": 0,
    "forced": DRAW,
    "keys": 0,
    **dict.fromkeys(_BIASES, 0),
}


def settings_sizes(rows: int, biases: int) -> dict[str, int]:
    per_row = dict.fromkeys((*PADS, KEEPS), rows)
    return per_row | {"keys": 2 * rows} | dict.fromkeys(_BIASES, biases)


def settings_arrays(sampling: SamplingInputs, nobody: int) -> dict[str, NDArray[np.generic]]:
    """All of them int32. `nobody` is a slot that no sequence has."""
    if sampling.all_greedy:  # nothing is drawn
        keys = np.zeros((len(sampling.slots), 2), np.int32)
    else:
        keys = row_keys(sampling.seed, sampling.choice, sampling.position)
    stated: dict[str, NDArray[np.generic]] = {
        "slots": sampling.slots,
        "top_k": sampling.top_k,
        "forced": sampling.forced,
        "keys": keys,
        "bias_rows": sampling.bias_rows,
        "bias_ids": sampling.bias_ids,
        KEEPS: np.where(sampling.forced == DRAW, sampling.slots, np.int32(nobody)),
    }
    return stated | {name: getattr(sampling, name).view(np.int32) for name in _FLOATS}


def settings_views(layout: Layout, buffer: Any, float32: Any) -> dict[str, Any]:
    """The settings as parts of a vector of any library, whose name for float32 is given."""
    views = layout.views(buffer, {"keys": 2})
    return views | {name: views[name].view(float32) for name in _FLOATS}
