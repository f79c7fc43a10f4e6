"""`sampler.sample` in a handful of kernels, for rows that ask for more than their likeliest token.

Settings travel together, in few copies; what they mean is the sampler's, to which tests hold this.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.custom.frameworks.torch.execution.history import TokenHistory
from engine.backends.custom.frameworks.torch.execution.sampler import Sampled, with_logprobs
from engine.backends.custom.frameworks.torch.execution.transfer import to_device
from engine.backends.custom.frameworks.torch.kernels.sampling import (
    add_bias_,
    draw,
    greedy,
    penalize,
)
from engine.backends.custom.runtime.noise import row_keys
from engine.backends.custom.runtime.seam import DRAW, SamplingInputs


def sample(
    logits: Tensor, sampling: SamplingInputs, history: TokenHistory, words: Tensor
) -> Sampled:
    """logits (R, V) float32 are left as they are; `words` are the vocabulary's `token_words`."""
    adjusted = _adjusted(logits, sampling, history)
    mask = sampling.mask
    allowed = None if mask is None else to_device(mask.view(np.int32), logits.device)
    if sampling.all_greedy:
        tokens = greedy(adjusted, allowed)
    else:
        keys = row_keys(sampling.seed, sampling.choice, sampling.position)
        temperature, top_k, top_p, min_p = _sent(
            logits.device, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        )
        tokens = draw(
            adjusted,
            temperature.view(torch.float32),
            top_k,
            top_p.view(torch.float32),
            min_p.view(torch.float32),
            to_device(keys, logits.device),
            words,
            allowed,
        )
    if (sampling.forced != DRAW).any():
        (forced,) = _sent(logits.device, sampling.forced)
        tokens = torch.where(forced < 0, tokens, forced)
    if (sampling.num_logprobs < 0).all():
        return Sampled(tokens)
    return with_logprobs(logits, tokens, int(sampling.num_logprobs.max()))


def _adjusted(logits: Tensor, sampling: SamplingInputs, history: TokenHistory) -> Tensor:
    """With penalties and biases; the logits themselves where there are none."""
    adjusted = logits
    if sampling.has_penalties:
        slots, lengths, num_prompt, repetition, presence, frequency = _sent(
            logits.device,
            sampling.slots,
            sampling.position,
            history.num_prompt(sampling.slots),
            sampling.repetition,
            sampling.presence,
            sampling.frequency,
        )
        adjusted = penalize(
            logits,
            history.tokens,
            slots,
            lengths,
            num_prompt,
            repetition.view(torch.float32),
            presence.view(torch.float32),
            frequency.view(torch.float32),
            torch.zeros(logits.shape, dtype=torch.int32, device=logits.device),
        )
    if len(sampling.bias_rows):
        rows, ids, values = _sent(
            logits.device, sampling.bias_rows, sampling.bias_ids, sampling.bias_values
        )
        own = logits.clone() if adjusted is logits else adjusted
        adjusted = add_bias_(own, rows, ids, values.view(torch.float32))
    return adjusted


def _sent(device: torch.device, *arrays: NDArray[np.generic]) -> tuple[Tensor, ...]:
    """32-bit arrays of one length in one copy; floats arrive as the integers of their bits."""
    return to_device(np.stack([array.view(np.int32) for array in arrays]), device).unbind(0)
