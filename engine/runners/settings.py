"""Converts the sampling settings of a batch to 32-bit words, for runners that sample on the device.

The arrays have the names of the fields of `SamplingInputs`. Most have a value for each row, (R,).
The keys of the random noise, `keys`, are (R, 2), and the logit biases are (N,). Floats are copied
as bit patterns. Rows and biases that are padding have no effect.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.runners.layout import Layout
from engine.runtime.model_runner import SAMPLE, SamplingInputs
from engine.runtime.samplers.host_sampler import row_keys

# The name of an array with a slot for each row. The device stores the row's sampled token as the
# last token of this slot. If the token is forced, this is the spare slot, which no sequence reads.
KEEPS = "keeps"
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "bias_values")
_BIASES = ("bias_rows", "bias_ids", "bias_values")
_ONE = int(np.float32(1).view(np.int32))  # bit pattern of 1.0
# Settings of padding rows, which sample greedily.
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
    """The settings as arrays of 32-bit words, by name. `spare_slot` is a slot that no sequence
    uses.
    """
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
        KEEPS: np.where(sampling.keeps, sampling.slots, np.int32(spare_slot)),
    }
    return stated | {name: getattr(sampling, name).view(np.int32) for name in _FLOATS}


def settings_views(layout: Layout, buffer: Any, float32: Any) -> dict[str, Any]:
    """The settings by name, as slices of the packed vector `buffer`. The vector may be a tensor of
    any library. `float32` is the float32 dtype of that library.
    """
    views = layout.views(buffer, {"keys": 2})
    return views | {name: views[name].view(float32) for name in _FLOATS}
