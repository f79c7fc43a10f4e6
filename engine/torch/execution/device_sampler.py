"""Samples with GPU kernels. The kernels read the sampling settings of each row from device memory.

The semantics are those of `sampler.py`, and tests compare the two modules. All settings are copied
to the device at once. The host uses the settings only to choose which kernels run (`Kind`). So
`choose` over static buffers can be captured as one CUDA graph per kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.runners import settings
from engine.runners.layout import Layout
from engine.runtime.model_runner import SamplingInputs
from engine.runtime.outputs import Sampled
from engine.torch.execution.history import TokenHistory
from engine.torch.execution.sampler import with_logprobs
from engine.torch.kernels.sampling import (
    Penalties,
    RowSettings,
    add_bias_,
    greedy,
    penalize,
    random_sample,
)
from engine.torch.transfer import to_device

MASK = "mask"
PADS = settings.PADS | {"position": 0, "num_prompt": 0}


@dataclass(frozen=True, slots=True)
class Kind:
    """The sampling features that a step uses. They decide which kernels run."""

    adjusts: bool  # whether some row has penalties or logit biases
    masks: bool  # whether some row has a mask of allowed tokens
    samples: bool  # whether some row's temperature is above 0


def kind_of(sampling: SamplingInputs) -> Kind:
    return Kind(
        adjusts=sampling.has_penalties or len(sampling.bias_rows) > 0,
        masks=sampling.mask is not None,
        samples=not sampling.all_greedy,
    )


def settings_sizes(rows: int, biases: int) -> dict[str, int]:
    return settings.settings_sizes(rows, biases) | {"position": rows, "num_prompt": rows}


def settings_arrays(
    sampling: SamplingInputs, history: TokenHistory
) -> dict[str, NDArray[np.generic]]:
    """The settings of all rows as int32 arrays, by name."""
    mask = np.zeros(0, np.uint32) if sampling.mask is None else sampling.mask
    return settings.settings_arrays(sampling, history.spare_slot) | {
        "position": sampling.position,
        "num_prompt": history.num_prompt(sampling.slots),
        MASK: mask.view(np.int32),
    }


def settings_views(layout: Layout, buffer: Tensor) -> dict[str, Tensor]:
    return settings.settings_views(layout, buffer, torch.float32)


def choose(
    logits: Tensor, given: Mapping[str, Tensor], kind: Kind, history: Tensor, words: Tensor
) -> Tensor:
    """Chooses a token per row, (R,) int64, from logits (R, V), which are not modified.

    `given` has the settings on the device by name. It may have padding rows; only the first R rows
    are used. `history` has the tokens of all slots. `words` are the vocabulary's `token_words`.
    """
    rows, vocabulary = logits.shape
    of_rows = {name: given[name][:rows] for name in PADS if not name.startswith("bias")}
    adjusted = logits.float()
    if kind.adjusts:
        adjusted = _adjusted(adjusted, given, of_rows, history)
    mask = None
    if kind.masks:
        width = -(-vocabulary // 32)
        mask = given[MASK][: rows * width].view(rows, width)
    if kind.samples:
        row_settings = RowSettings(*(of_rows[name] for name in RowSettings._fields))
        tokens = random_sample(adjusted, row_settings, words, mask)
    else:
        tokens = greedy(adjusted, mask)
    return torch.where(of_rows["forced"] < 0, tokens, of_rows["forced"])


def _adjusted(
    logits: Tensor, given: Mapping[str, Tensor], of_rows: Mapping[str, Tensor], history: Tensor
) -> Tensor:
    """A copy of the logits with penalties and biases applied."""
    penalties = Penalties(
        history,
        of_rows["slots"],
        of_rows["position"],
        of_rows["num_prompt"],
        of_rows["repetition"],
        of_rows["presence"],
        of_rows["frequency"],
    )
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    adjusted = penalize(logits, penalties, counts)
    if not len(given["bias_rows"]):
        return adjusted
    return add_bias_(adjusted, given["bias_rows"], given["bias_ids"], given["bias_values"])


def sample(
    logits: Tensor, sampling: SamplingInputs, history: TokenHistory, words: Tensor
) -> Sampled:
    """Samples a token per row from logits (R, V) float32, which are not modified. `words` are the
    vocabulary's `token_words`.
    """
    sizes = settings_sizes(len(logits), len(sampling.bias_rows))
    layout = Layout(sizes, PADS, last=MASK)
    packed = layout.packed(settings_arrays(sampling, history))
    given = settings_views(layout, to_device(packed, logits.device))
    tokens = choose(logits, given, kind_of(sampling), history.tokens, words)
    if (sampling.num_logprobs < 0).all():
        return Sampled(tokens)
    return with_logprobs(logits, tokens, int(sampling.num_logprobs.max()))
