"""Each row's sampling settings as 32-bit words, for devices that sample themselves.

Arrays have the names of `SamplingInputs` and shape (R,), except `keys` (R, 2), the noise keys, and
biases (N,). Floats travel as their bits. Padding rows and padding biases have no effect.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.frameworks.layout import Layout
from engine.backends.custom.runtime.host_sampler import row_keys
from engine.backends.custom.runtime.model_runner import SAMPLE, SamplingInputs

KEEPS = "keeps"  # the slot that stores a row's token; a forced token goes to the spare slot
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "bias_values")
_BIASES = ("bias_rows", "bias_ids", "bias_values")
_ONE = int(np.float32(1).view(np.int32))  # bit pattern of 1.0
# Settings of padding rows: greedy.
PADS = {
    "slots": 0,
    "temperature": 0,
    "top_k": 0,
    "top_p": _ONE,
    "min_p": 0,
    "repetition": _ONE,
    "presence": 0,
    "frequency": 0,
    "forced": SAMPLE,
    "keys": 0,
    **dict.fromkeys(_BIASES, 0),
}


def settings_sizes(rows: int, biases: int) -> dict[str, int]:
    per_row = dict.fromkeys((*PADS, KEEPS), rows)
    return per_row | {"keys": 2 * rows} | dict.fromkeys(_BIASES, biases)


def settings_arrays(sampling: SamplingInputs, spare_slot: int) -> dict[str, NDArray[np.generic]]:
    """All arrays are int32. No sequence owns `spare_slot`."""
    if sampling.all_greedy:  # no noise keys are needed
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
        KEEPS: np.where(sampling.forced == SAMPLE, sampling.slots, np.int32(spare_slot)),
    }
    return stated | {name: getattr(sampling, name).view(np.int32) for name in _FLOATS}


def settings_views(layout: Layout, buffer: Any, float32: Any) -> dict[str, Any]:
    """The settings as slices of any library's vector; `float32` is that library's dtype."""
    views = layout.views(buffer, {"keys": 2})
    return views | {name: views[name].view(float32) for name in _FLOATS}
