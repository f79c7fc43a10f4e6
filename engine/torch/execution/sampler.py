"""Samples tokens from logits, in a stateless function.

The order is penalties, bias, mask, temperature, top-k, top-p, min-p, sample. Log-probabilities are
computed from the model's logits, before the first of these. Top-k, top-p and min-p are thresholds:
they keep all tokens that are at least as likely as the threshold. If tokens tie at the threshold,
all of them are kept, so the result does not depend on the order of tokens. Sampling adds Gumbel
noise, which depends on the row's key, and takes the argmax. A row with temperature 0 takes the
argmax without noise.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.runtime.model_runner import I32, SAMPLE, U32, SamplingInputs
from engine.runtime.outputs import Sampled
from engine.runtime.samplers.host_sampler import row_keys
from engine.torch.execution.history import TokenHistory
from engine.torch.kernels.sampling import MINUS_INFINITY, gumbel, nucleus_floor
from engine.torch.transfer import to_device


def sample(
    logits: Tensor, sampling: SamplingInputs, history: TokenHistory, words: Tensor
) -> Sampled:
    """Samples a token per row from logits (R, V) float32, which are not modified. `words` are the
    vocabulary's `token_words`.
    """
    adjusted = logits
    if sampling.has_penalties:
        adjusted = penalize(adjusted, sampling, history)
    if len(sampling.bias_rows):
        adjusted = add_bias(adjusted, sampling)
    if sampling.mask is not None:
        adjusted = apply_mask(adjusted, sampling.mask)
    tokens = adjusted.argmax(dim=-1)
    if not sampling.all_greedy:
        rows = np.flatnonzero(sampling.temperature)
        sampled = random_sample(_take(adjusted, rows), sampling, rows, words)
        tokens = tokens.index_copy(0, to_device(rows, logits.device), sampled)
    forced = np.flatnonzero(sampling.forced != SAMPLE)
    if len(forced):
        given = to_device(sampling.forced[forced].astype(np.int64), logits.device)
        tokens = tokens.index_copy(0, to_device(forced, logits.device), given)
    if (sampling.num_logprobs < 0).all():
        return Sampled(tokens)
    return with_logprobs(logits, tokens, int(sampling.num_logprobs.max()))


def penalize(logits: Tensor, sampling: SamplingInputs, history: TokenHistory) -> Tensor:
    """Applies the penalties to the logits. The repetition penalty is a factor for tokens of prompt
    and output. Frequency and presence penalties are subtracted from the logits of tokens that the
    output already has.
    """
    active = (sampling.repetition != 1) | (sampling.presence != 0) | (sampling.frequency != 0)
    rows = np.flatnonzero(active)

    def column(values: NDArray[np.float32]) -> Tensor:
        return to_device(values[rows], logits.device)[:, None]

    some = _take(logits, rows)
    tokens, is_output = history.read(sampling.slots[rows], sampling.position[rows])  # (P, L)
    counts = torch.zeros_like(some).scatter_add_(1, tokens, is_output).gather(1, tokens)
    repetition = column(sampling.repetition)
    values = some.gather(1, tokens)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= column(sampling.frequency) * counts
    values -= column(sampling.presence) * (counts > 0)
    # A token that occurs several times in a row's history is written several times, always with the
    # same value.
    penalized = some.scatter(1, tokens, values)
    return logits.index_copy(0, to_device(rows, logits.device), penalized)


def add_bias(logits: Tensor, sampling: SamplingInputs) -> Tensor:
    rows = to_device(sampling.bias_rows.astype(np.int64), logits.device)
    ids = to_device(sampling.bias_ids.astype(np.int64), logits.device)
    values = to_device(sampling.bias_values, logits.device)
    return logits.index_put((rows, ids), values, accumulate=True)


def apply_mask(logits: Tensor, mask: U32) -> Tensor:
    return logits.masked_fill(forbidden(mask, logits.shape[1], logits.device), MINUS_INFINITY)


def forbidden(mask: U32, vocab_size: int, device: torch.device) -> Tensor:
    """Unpacks the bits of `mask`. Returns whether each token is forbidden, (R, V) bool. On a CPU,
    numpy unpacks the bits, because waking PyTorch's threads takes longer than this work. A GPU gets
    the packed bits and unpacks them itself.
    """
    if device.type == "cpu":
        bits = np.unpackbits((~mask).view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    words = to_device(mask.view(np.int32), device)  # (R, ceil(V / 32))
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((words[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab_size] == 0


def random_sample(
    logits: Tensor, sampling: SamplingInputs, rows: NDArray[np.intp], words: Tensor
) -> Tensor:
    """Samples one token for each row in `rows`, (len(rows),). The temperatures of these rows are
    above 0. `logits` has only these rows.
    """
    device = logits.device
    logits = logits / to_device(sampling.temperature[rows], device)[:, None]
    top_k, top_p, min_p = sampling.top_k[rows], sampling.top_p[rows], sampling.min_p[rows]
    if (top_k > 0).any():
        logits = keep_top_k(logits, top_k)
    if (top_p < 1).any() or min_p.any():
        logits = keep_likely(logits, top_p, min_p)
    keys = row_keys(sampling.seed[rows], sampling.choice[rows], sampling.position[rows])
    return (logits + gumbel(to_device(keys, device), words)).argmax(dim=-1)


def keep_top_k(logits: Tensor, top_k: I32) -> Tensor:
    size = logits.shape[1]
    counts = np.where(top_k > 0, np.minimum(top_k, size), size).astype(np.int64)
    rows = np.flatnonzero(counts < size)
    if not len(rows):
        return logits
    some = _take(logits, rows)
    best = some.topk(int(counts[rows].max())).values
    floor = best.gather(1, to_device(counts[rows] - 1, logits.device)[:, None])
    kept = some.masked_fill(some < floor, MINUS_INFINITY)
    return logits.index_copy(0, to_device(rows, logits.device), kept)


def keep_likely(logits: Tensor, top_p: NDArray[np.float32], min_p: NDArray[np.float32]) -> Tensor:
    """Applies top-p and min-p: sets the logits of tokens below either threshold to -inf. The min-p
    threshold is `min_p` times the probability of the likeliest token. Top-p always keeps the
    likeliest token.
    """
    probs = logits.softmax(dim=-1)
    floor = probs.amax(dim=-1, keepdim=True) * to_device(min_p, logits.device)[:, None]
    rows = np.flatnonzero(top_p < 1)
    if len(rows):
        where = to_device(rows, logits.device)
        target = to_device(top_p[rows], logits.device)
        nucleus = nucleus_floor(_take(probs, rows), target)
        floor = floor.index_copy(0, where, torch.maximum(floor[where], nucleus))
    return logits.masked_fill(probs < floor, MINUS_INFINITY)


def with_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Sampled:
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]) - total
    top = logits.topk(num_top)
    return Sampled(tokens, chosen[:, 0], top.indices, top.values - total)


def _take(values: Tensor, rows: NDArray[np.intp]) -> Tensor:
    if len(rows) == len(values):
        return values
    return values.index_select(0, to_device(rows, values.device))
