"""`sampler.sample` as kernels over settings that lie on the device, one value per row.

What the settings mean is the sampler's, to which tests hold this. They travel in one copy. Nothing
here depends on their values but which kernels run, which `Kind` says: `choose` over buffers that
stay where they are can be captured once for each kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.custom.frameworks.torch.execution.history import TokenHistory
from engine.backends.custom.frameworks.torch.execution.sampler import Sampled, with_logprobs
from engine.backends.custom.frameworks.torch.execution.staging import Layout
from engine.backends.custom.frameworks.torch.execution.transfer import to_device
from engine.backends.custom.frameworks.torch.kernels.sampling import (
    add_bias_,
    draw,
    greedy,
    penalize,
)
from engine.backends.custom.runtime.noise import row_keys
from engine.backends.custom.runtime.seam import DRAW, SamplingInputs

MASK = "mask"
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "bias_values")
_ONE = int(np.float32(1).view(np.int32))  # the bits of 1.0
# What rows that belong to nobody ask for: their likeliest token.
PADS = {
    "slots": 0,
    "position": 0,
    "num_prompt": 0,
    "temperature": 0,
    "top_k": 0,
    "top_p": _ONE,
    "min_p": 0,
    "repetition": _ONE,
    "presence": 0,
    "frequency": 0,
    "forced": DRAW,
    "keys": 0,
    "bias_rows": 0,
    "bias_ids": 0,
    "bias_values": 0,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """What some row of a step asks for, and thus which kernels run."""

    adjusts: bool  # penalties or biases
    masks: bool
    draws: bool  # at random


def kind_of(sampling: SamplingInputs) -> Kind:
    return Kind(
        adjusts=sampling.has_penalties or len(sampling.bias_rows) > 0,
        masks=sampling.mask is not None,
        draws=not sampling.all_greedy,
    )


def settings_sizes(rows: int, biases: int) -> dict[str, int]:
    per_bias = dict.fromkeys(("bias_rows", "bias_ids", "bias_values"), biases)
    return dict.fromkeys(PADS, rows) | {"keys": 2 * rows} | per_bias


def settings_arrays(
    sampling: SamplingInputs, history: TokenHistory
) -> dict[str, NDArray[np.generic]]:
    """As 32-bit integers: floats by their bits."""
    mask = np.zeros(0, np.uint32) if sampling.mask is None else sampling.mask
    stated = {
        "slots": sampling.slots,
        "position": sampling.position,
        "num_prompt": history.num_prompt(sampling.slots),
        "top_k": sampling.top_k,
        "forced": sampling.forced,
        "keys": row_keys(sampling.seed, sampling.choice, sampling.position),
        "bias_rows": sampling.bias_rows,
        "bias_ids": sampling.bias_ids,
        MASK: mask.view(np.int32),
    }
    return stated | {name: getattr(sampling, name).view(np.int32) for name in _FLOATS}


def settings_views(layout: Layout, buffer: Tensor) -> dict[str, Tensor]:
    views = layout.views(buffer, {"keys": 2})
    return views | {name: views[name].view(torch.float32) for name in _FLOATS}


def choose(
    logits: Tensor, settings: Mapping[str, Tensor], kind: Kind, history: Tensor, words: Tensor
) -> Tensor:
    """(R,) int64 from logits (R, V), which are left as they are, and the first R of the settings.

    `history` is the slots' tokens, `words` the vocabulary's `token_words`.
    """
    rows, vocabulary = logits.shape
    of_rows = {name: settings[name][:rows] for name in PADS if not name.startswith("bias")}
    adjusted = logits.float()
    if kind.adjusts:
        adjusted = _adjusted(adjusted, settings, of_rows, history)
    mask = None
    if kind.masks:
        width = -(-vocabulary // 32)
        mask = settings[MASK][: rows * width].view(rows, width)
    if kind.draws:
        tokens = draw(
            adjusted,
            of_rows["temperature"],
            of_rows["top_k"],
            of_rows["top_p"],
            of_rows["min_p"],
            of_rows["keys"],
            words,
            mask,
        )
    else:
        tokens = greedy(adjusted, mask)
    return torch.where(of_rows["forced"] < 0, tokens, of_rows["forced"])


def _adjusted(
    logits: Tensor, settings: Mapping[str, Tensor], of_rows: Mapping[str, Tensor], history: Tensor
) -> Tensor:
    """A copy with penalties and biases."""
    adjusted = penalize(
        logits,
        history,
        of_rows["slots"],
        of_rows["position"],
        of_rows["num_prompt"],
        of_rows["repetition"],
        of_rows["presence"],
        of_rows["frequency"],
        torch.zeros(logits.shape, dtype=torch.int32, device=logits.device),
    )
    if not len(settings["bias_rows"]):
        return adjusted
    return add_bias_(adjusted, settings["bias_rows"], settings["bias_ids"], settings["bias_values"])


def sample(
    logits: Tensor, sampling: SamplingInputs, history: TokenHistory, words: Tensor
) -> Sampled:
    """logits (R, V) float32 are left as they are; `words` are the vocabulary's `token_words`."""
    sizes = settings_sizes(len(logits), len(sampling.bias_rows))
    layout = Layout(sizes, PADS, last=MASK)
    arrays = settings_arrays(sampling, history)
    packed = np.empty(layout.length(arrays), np.int32)
    layout.write(packed, arrays)
    settings = settings_views(layout, to_device(packed, logits.device))
    tokens = choose(logits, settings, kind_of(sampling), history.tokens, words)
    if (sampling.num_logprobs < 0).all():
        return Sampled(tokens)
    return with_logprobs(logits, tokens, int(sampling.num_logprobs.max()))
