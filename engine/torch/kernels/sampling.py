"""Samples tokens on the device. The host reads nothing back, and no shape depends on values.

The order is penalties, bias, mask, temperature, top-k, top-p, min-p, sample. Tests compare these
kernels with `execution/sampler.py`. Settings are tensors with one value per row. A row that does
not use a setting has a value without effect, so one captured CUDA graph serves every mix of
requests.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.runtime.samplers.host_sampler import MASK_31, MIX_1, MIX_2, row_keys, token_words
from engine.torch.kernels.base import Example, Inputs, Shape, Tolerance, op, size_of

MINUS_INFINITY = float("-inf")
_LOGITS = {torch.float32: Tolerance(1e-6, 1e-6)}
_PENALIZED = {torch.float32: Tolerance(1e-5, 1e-5)}
_MAX_ROWS = 256


class RowSettings(NamedTuple):
    """How each row is sampled: values of (R,), and the rows' `row_keys` (R, 2)."""

    temperature: Tensor
    top_k: Tensor  # int32
    top_p: Tensor
    min_p: Tensor
    keys: Tensor


class Penalties(NamedTuple):
    """The penalties of each row, (R,), and the tokens to which they apply. The tokens of row r are
    the first `lengths[r]` tokens of history[slots[r]] (int64). The first `num_prompt[r]` of these
    tokens are the prompt.
    """

    history: Tensor
    slots: Tensor
    lengths: Tensor
    num_prompt: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@op("sampling:greedy")
def greedy(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """The token with the largest logit of each row: (R, V) float32 -> (R,) int64. If several tokens
    have the largest logit, the lowest token id wins.

    `mask` is int32 (R, ceil(V / 32)) with one bit per token. Tokens whose bit is 0 are not allowed.
    """
    return _allowed(logits, mask).argmax(dim=-1)


@op("sampling:random_sample")
def random_sample(
    logits: Tensor, settings: RowSettings, words: Tensor, mask: Tensor | None
) -> Tensor:
    """Samples one token per row, (R,) int64. A row with temperature 0 gets its most likely token.

    `words` (V,) are the vocabulary's `token_words`. Keys and words determine the random noise.
    """
    temperature, top_k, top_p, min_p, keys = settings
    logits = _allowed(logits, mask)
    hot, size = temperature > 0, logits.shape[1]
    scaled = logits / torch.where(hot, temperature, 1.0)[:, None]
    kept = torch.where((top_k > 0) & (top_k < size), top_k, size).long()[:, None]
    floor = scaled.sort(dim=-1, descending=True).values.gather(1, kept - 1)
    scaled = scaled.masked_fill(scaled < floor, MINUS_INFINITY)
    probs = scaled.softmax(dim=-1)
    least = probs.amax(dim=-1, keepdim=True) * min_p[:, None]
    nucleus = torch.maximum(least, nucleus_floor(probs, top_p))
    least = torch.where((top_p < 1)[:, None], nucleus, least)
    scaled = scaled.masked_fill(probs < least, MINUS_INFINITY)
    sampled = (scaled + gumbel(keys, words)).argmax(dim=-1)
    return torch.where(hot, sampled, logits.argmax(dim=-1))


@op("penalties:penalize")
def penalize(logits: Tensor, penalties: Penalties, counts: Tensor) -> Tensor:
    """Returns a copy of the logits with each row's penalties applied. `counts` (R, V) int32 is
    scratch memory. It must be all zeros, and it is all zeros again afterwards.
    """
    history, slots, lengths, num_prompt, repetition, presence, frequency = penalties
    tokens = history[slots]  # (R, L)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    known = columns < lengths[:, None]
    output = (known & (columns >= num_prompt[:, None])).float()
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, known.float()) > 0
    times = torch.zeros_like(logits).scatter_add_(1, tokens, output)
    factor = repetition[:, None]
    values = torch.where(logits > 0, logits / factor, logits * factor)
    values = values - frequency[:, None] * times - presence[:, None] * (times > 0)
    return torch.where(seen, values, logits)


@op("penalties:add_bias_")
def add_bias_(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Adds values[i] to the logit of token ids[i] in row rows[i], in place, for each of the N
    biases. Padding biases have the value 0.
    """
    return logits.index_put_((rows, ids), values, accumulate=True)


def gumbel(keys: Tensor, words: Tensor) -> Tensor:
    """Standard Gumbel noise (R, V) from row keys (R, 2) and token words (V,). On all devices, it
    has the random bits of the host sampler.
    """
    bits = words ^ keys[:, :1]  # (R, V) int32
    bits *= keys[:, 1:]
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= MIX_1
    bits ^= (bits >> 16) & 0xFFFF
    bits *= MIX_2
    bits &= MASK_31
    # Uniform numbers in (0, 1). Floats are most closely spaced near 0. Numbers near 0 also give the
    # largest noise, and the largest noise decides which token is sampled.
    uniform = bits.to(torch.float32).clamp_(0.5, 2.0**31 - 128).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def nucleus_floor(probs: Tensor, target: Tensor) -> Tensor:
    """The top-p threshold of each row, (R, 1): the largest probability such that the tokens at or
    above it sum to at least `target`.

    The threshold is found bit by bit, by bisection, since the bits of positive floats sort like
    their values. On a CPU this is several times faster than sorting the vocabulary. The last 7 bits
    stay 0, so tokens whose probabilities agree to one part in 65,536 count as equally likely.
    """
    floor = torch.full_like(probs[:, :1], 2.0**-63).view(torch.int32)
    above = torch.empty_like(probs)
    # Floats from 2 ** -63 to 1 have bit 29 set, so the search starts at bit 28.
    for bit in reversed(range(7, 29)):
        higher = floor | (1 << bit)
        torch.ge(probs, higher.view(torch.float32), out=above)  # float output: bool is slower
        mass = torch.linalg.vecdot(probs, above)
        floor = torch.where((mass >= target)[:, None], higher, floor)
    return floor.view(torch.float32)


def _allowed(logits: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return logits
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    bits = ((mask[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(bits == 0, MINUS_INFINITY)


def _rows(shape: Shape, device: torch.device) -> Iterator[tuple[int, Inputs, Tensor]]:
    inputs = Inputs(device, torch.float32)
    for rows in shape.rows:
        if rows <= _MAX_ROWS:
            yield rows, inputs, inputs.normal(rows, shape.vocab_size, scale=4)


def _greedy_examples(shape: Shape, device: torch.device, _: torch.dtype) -> Iterator[Example]:
    for rows, inputs, logits in _rows(shape, device):
        yield Example(f"{rows}", (logits, None))
        yield Example(f"{rows} masked", (logits, _mask(inputs, rows, shape.vocab_size)))


def _mask(inputs: Inputs, rows: int, vocab_size: int) -> Tensor:
    return inputs.integers(2**31 - 1, rows, -(-vocab_size // 32), dtype=torch.int32)


def _random_sample_examples(
    shape: Shape, device: torch.device, _: torch.dtype
) -> Iterator[Example]:
    words = torch.from_numpy(token_words(shape.vocab_size)).to(device)
    # The (top_k, top_p, min_p) of all rows in an example.
    uses = {
        "temperature": (0, 1.0, 0.0),
        "top-k": (7, 1.0, 0.0),
        "top-p": (0, 0.8, 0.0),
        "min-p": (0, 1.0, 0.1),
        "all": (20, 0.9, 0.02),
    }
    for rows, inputs, logits in _rows(shape, device):
        keys = row_keys(np.arange(rows), np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32))
        temperature = 0.5 + inputs.uniform(rows)
        temperature[1::4] = 0
        for name, (top_k, top_p, min_p) in uses.items():
            settings = RowSettings(
                temperature,
                torch.full((rows,), top_k, dtype=torch.int32, device=device),
                torch.full((rows,), top_p, device=device),
                torch.full((rows,), min_p, device=device),
                torch.from_numpy(keys).to(device),
            )
            mask = _mask(inputs, rows, shape.vocab_size) if name == "all" else None
            yield Example(f"{rows} {name}", (logits, settings, words, mask))


def _penalize_examples(shape: Shape, device: torch.device, _: torch.dtype) -> Iterator[Example]:
    for rows, inputs, logits in _rows(shape, device):
        lengths = inputs.integers(shape.context, rows) + 1
        repetition = torch.full((rows,), 1.3, device=device)
        frequency, presence = inputs.uniform(rows), inputs.uniform(rows)
        for setting, off in ((repetition, 1), (frequency, 0), (presence, 0)):
            setting[2::3] = off
        penalties = Penalties(
            inputs.integers(shape.vocab_size // 8, rows + 2, shape.context + 1),
            inputs.permutation(rows + 2)[:rows],
            lengths,
            lengths // 2,
            repetition,
            presence,
            frequency,
        )
        counts = torch.zeros(logits.shape, dtype=torch.int32, device=device)
        yield Example(f"{rows}", (logits, penalties, counts))


def _bias_examples(shape: Shape, device: torch.device, _: torch.dtype) -> Iterator[Example]:
    for rows, inputs, logits in _rows(shape, device):
        places = (inputs.integers(rows, 40), inputs.integers(shape.vocab_size, 40))
        values = inputs.normal(40)
        values[3] = MINUS_INFINITY
        yield Example(f"{rows}, 40 values", (logits, *places, values))


greedy.specify(_greedy_examples, size_of, tolerance=_LOGITS)
random_sample.specify(
    _random_sample_examples, lambda logits, *_: size_of(logits), tolerance=_LOGITS
)
penalize.specify(
    _penalize_examples, lambda logits, *_: size_of(logits, logits, logits), tolerance=_PENALIZED
)
add_bias_.specify(
    _bias_examples,
    lambda logits, rows, ids, values: size_of(rows, ids, values, values, values),
    tolerance=_PENALIZED,
)
