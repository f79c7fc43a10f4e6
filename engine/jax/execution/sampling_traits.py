"""The properties of a step's sampling that are known at compile time, and the layout of the
sampling settings in one vector.
"""

from functools import cache
from typing import NamedTuple

from jax import Array

from engine.jax.execution.buckets import padded_rows
from engine.runners import settings
from engine.runners.layout import Layout
from engine.runtime.model_runner import F32, I32, SamplingInputs

# The device computes one of these numbers of top log-probabilities per token. The host drops those
# that the request did not ask for.
NUM_TOPS = (0, 5, 20)


class Traits(NamedTuple):
    """The properties of a step's sampling. A version of `sample_step` is compiled for each
    combination of these values.
    """

    num_rows: int  # number of rows, with padding
    num_biases: int  # number of logit biases in all rows, with padding
    samples: bool  # whether some row's temperature is above 0
    filters: bool  # whether some row uses top-k, top-p or min-p
    num_top: int | None  # number of top log-probabilities; None: no log-probabilities at all
    keeps_hidden: bool


# The rows' temperatures, the traits, and the packed settings on the device. Consecutive decode-only
# steps share the array object of temperatures, so its identity tells whether settings changed.
Settings = tuple[F32, Traits, Array]


def traits_of(sampling: SamplingInputs, vocab_size: int) -> Traits:
    samples = not sampling.all_greedy
    filters = sampling.top_k.any() or (sampling.top_p < 1).any() or sampling.min_p.any()
    num_biases = len(sampling.bias_rows)
    return Traits(
        num_rows=padded_rows(len(sampling.slots)),
        num_biases=padded_rows(num_biases) if num_biases else 0,
        samples=samples,
        filters=samples and bool(filters),
        num_top=_num_top(int(sampling.num_logprobs.max(initial=-1)), vocab_size),
        keeps_hidden=len(sampling.hidden_rows) > 0,
    )


def _num_top(wanted: int, vocab_size: int) -> int | None:
    if wanted < 0:
        return None
    return min(next((size for size in NUM_TOPS if size >= wanted), wanted), vocab_size)


@cache
def settings_layout(traits: Traits, max_slots: int) -> Layout:
    """The layout of the arrays of `runners/settings.py` in one vector. The spare slot, which no
    sequence uses, has the number `max_slots`.
    """
    sizes = settings.settings_sizes(traits.num_rows, traits.num_biases)
    return Layout(sizes, settings.PADS | {settings.KEEPS: max_slots})


def packed_settings(sampling: SamplingInputs, traits: Traits, max_slots: int) -> I32:
    arrays = settings.settings_arrays(sampling, max_slots)
    return settings_layout(traits, max_slots).packed(arrays)
