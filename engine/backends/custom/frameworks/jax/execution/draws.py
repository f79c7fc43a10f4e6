"""How a step's rows choose, padded and packed for the device, and what of it has to be compiled."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from engine.backends.custom.frameworks.jax.execution.buckets import padded_rows
from engine.backends.custom.frameworks.jax.execution.packing import (
    Shape,
    Words,
    pack,
    padded,
    unpack,
)
from engine.backends.custom.runtime.noise import row_keys
from engine.backends.custom.runtime.seam import DRAW, I32, SamplingInputs

# Alternatives beside a drawn token are computed in one of these numbers and cut on the host.
NUM_TOPS = (0, 5, 20)
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "bias_values")


class Traits(NamedTuple):
    """What the second half of a step was compiled for."""

    num_rows: int  # padded
    num_biases: int  # padded
    draws: bool  # some row's temperature is above 0
    filters: bool  # top-k, top-p or min-p
    num_top: int | None  # None: no log-probabilities
    keeps_hidden: bool


class Draws(NamedTuple):
    """How R rows choose."""

    slots: Words  # (R,)
    drawn_slots: Words  # (R,) where the drawn token is remembered; max_slots: nowhere
    forced: Words  # (R,)
    top_k: Words  # (R,)
    temperature: Words  # (R,)
    top_p: Words  # (R,)
    min_p: Words  # (R,)
    repetition: Words  # (R,)
    presence: Words  # (R,)
    frequency: Words  # (R,)
    keys: Words  # (R, 2) of the noise
    bias_rows: Words  # (N,) padding is beyond R
    bias_ids: Words  # (N,)
    bias_values: Words  # (N,)


def traits_of(sampling: SamplingInputs, vocab_size: int) -> Traits:
    draws = not sampling.all_greedy
    filters = sampling.top_k.any() or (sampling.top_p < 1).any() or sampling.min_p.any()
    num_biases = len(sampling.bias_rows)
    return Traits(
        num_rows=padded_rows(len(sampling.slots)),
        num_biases=padded_rows(num_biases) if num_biases else 0,
        draws=draws,
        filters=draws and bool(filters),
        num_top=_num_top(int(sampling.num_logprobs.max(initial=-1)), vocab_size),
        keeps_hidden=len(sampling.hidden_rows) > 0,
    )


def _num_top(wanted: int, vocab_size: int) -> int | None:
    if wanted < 0:
        return None
    return min(next((size for size in NUM_TOPS if size >= wanted), wanted), vocab_size)


def packed_draws(sampling: SamplingInputs, traits: Traits, max_slots: int) -> I32:
    keys = np.zeros((len(sampling.slots), 2), np.int32)
    if traits.draws:
        keys = row_keys(sampling.seed, sampling.choice, sampling.position)
    rows, biases = traits.num_rows, traits.num_biases
    drawn = np.where(sampling.forced == DRAW, sampling.slots, max_slots).astype(np.int32)
    return pack(
        Draws(
            slots=padded(sampling.slots, rows),
            drawn_slots=padded(drawn, rows, max_slots),
            forced=padded(sampling.forced, rows, DRAW),
            top_k=padded(sampling.top_k, rows),
            temperature=padded(sampling.temperature, rows),
            top_p=padded(sampling.top_p, rows, 1),
            min_p=padded(sampling.min_p, rows),
            repetition=padded(sampling.repetition, rows, 1),
            presence=padded(sampling.presence, rows),
            frequency=padded(sampling.frequency, rows),
            keys=padded(keys, rows),
            bias_rows=padded(sampling.bias_rows, biases, rows),
            bias_ids=padded(sampling.bias_ids, biases),
            bias_values=padded(sampling.bias_values, biases),
        )
    )


def unpacked_draws(packed: Array, traits: Traits) -> Draws:
    rows: Shape = (traits.num_rows,)
    shapes: list[Shape] = [*[rows] * 10, (*rows, 2), *[(traits.num_biases,)] * 3]
    words = Draws(*unpack(packed, shapes))
    floats = {name: lax.bitcast_convert_type(getattr(words, name), jnp.float32) for name in FLOATS}
    return words._replace(**floats)
