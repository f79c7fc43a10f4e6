"""Samples tokens on the device, in pure functions that JAX compiles. They implement the same
semantics as `runtime/samplers/host_sampler.py`, which samples on the host.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from engine.jax.execution.sampling_traits import (
    Traits,
    settings_layout,
)
from engine.jax.layers.adapted import RowAdapters, with_adapters
from engine.jax.layers.linear import Params
from engine.jax.models.base import Model, final_norm, head_logits
from engine.runners.settings import KEEPS, settings_views
from engine.runtime.model_runner import SAMPLE
from engine.runtime.outputs import Sampled
from engine.runtime.samplers.host_sampler import gumbel

# In the token counts of a slot, the lowest bit of a token's count is set if the prompt has the
# token. The other bits count its occurrences in the output.
IN_PROMPT, PER_OUTPUT = 1, 2

Settings = Mapping[str, Array]  # the arrays of `runners/settings.py`, by name


def sample(
    logits: Array,
    settings: Settings,
    traits: Traits,
    words: Array,
    counts: Array | None,
    mask: Array | None,
) -> Sampled:
    """Samples one token per row from logits (R, V) float32.

    `words` (V,) are the vocabulary's `token_words`. `counts` (R, V) are the rows' token counts, or
    None if no row has penalties. `mask` (R, ceil(V / 32)) has a bit per allowed token, or is None
    if all tokens are allowed.
    """
    adjusted = logits
    if counts is not None:
        adjusted = penalize(adjusted, counts, settings)
    if traits.num_biases:
        adjusted = adjusted.at[settings["bias_rows"], settings["bias_ids"]].add(
            settings["bias_values"]
        )
    if mask is not None:
        adjusted = apply_mask(adjusted, mask)
    tokens = adjusted.argmax(axis=-1)
    if traits.samples:
        tokens = jnp.where(
            settings["temperature"] > 0, random_sample(adjusted, settings, traits, words), tokens
        )
    tokens = jnp.where(settings["forced"] == SAMPLE, tokens, settings["forced"]).astype(jnp.int32)
    return with_logprobs(logits, tokens, traits.num_top)


def penalize(logits: Array, counts: Array, settings: Settings) -> Array:
    """Applies the penalties to the logits. The repetition penalty is a factor for tokens of prompt
    and output. Frequency and presence penalties are subtracted from the logits of tokens that the
    output already has.
    """
    num_output = (counts // PER_OUTPUT).astype(jnp.float32)
    repetition = settings["repetition"][:, None]
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    penalized = jnp.where(counts > 0, scaled, logits)
    penalized -= settings["frequency"][:, None] * num_output
    return penalized - settings["presence"][:, None] * (num_output > 0)


def apply_mask(logits: Array, mask: Array) -> Array:
    size = logits.shape[1]
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(len(logits), -1)[:, :size] == 1
    return jnp.where(allowed, logits, -jnp.inf)


def random_sample(logits: Array, settings: Settings, traits: Traits, words: Array) -> Array:
    """Samples one token per row, (R,). Rows with temperature 0 are sampled at temperature 1, and
    the caller replaces their tokens by the greedy ones.
    """
    temperature = jnp.where(settings["temperature"] > 0, settings["temperature"], 1)
    logits = logits / temperature[:, None]
    if traits.filters:
        logits = keep_top_k(logits, settings["top_k"])
        logits = keep_likely(logits, settings["top_p"], settings["min_p"])
    return (logits + gumbel(jnp, settings["keys"], words)).argmax(axis=-1)


def keep_top_k(logits: Array, top_k: Array) -> Array:
    """Keeps the k largest logits of each row and sets the others to -inf.

    The k-th largest logit is found bit by bit, by bisection. This is several times faster than
    sorting.
    """
    wanted = jnp.where(top_k > 0, top_k, logits.shape[1])[:, None]
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    order = jnp.where(bits >= sign, ~bits, bits | sign)  # uint32 values that sort like the floats

    def try_bit(index: Array, floor: Array) -> Array:
        higher = floor | (sign >> index.astype(jnp.uint32))
        enough = (order >= higher).sum(axis=1, keepdims=True) >= wanted
        return jnp.where(enough, higher, floor)

    floor = lax.fori_loop(0, 32, try_bit, jnp.zeros((len(logits), 1), jnp.uint32))
    return jnp.where(order >= floor, logits, -jnp.inf)


def keep_likely(logits: Array, top_p: Array, min_p: Array) -> Array:
    """Applies top-p and min-p: sets the logits of tokens below either threshold to -inf. The min-p
    threshold is `min_p` times the probability of the likeliest token. Top-p always keeps the
    likeliest token.
    """
    probs = jax.nn.softmax(logits, axis=-1)
    floor = probs.max(axis=-1, keepdims=True) * min_p[:, None]
    nucleus = jnp.where(top_p < 1, nucleus_floor(probs, top_p), 0)
    return jnp.where(probs < jnp.maximum(floor, nucleus[:, None]), -jnp.inf, logits)


def nucleus_floor(probs: Array, target: Array) -> Array:
    """The top-p threshold of each row, (R,): the largest probability such that the tokens at or
    above it sum to at least `target`.

    The threshold is found bit by bit, by bisection, since the bits of positive floats sort like
    their values. The last 7 bits stay 0, so tokens whose probabilities agree to one part in 65,536
    count as equally likely.
    """
    lowest = jnp.full(len(probs), 2.0**-63, jnp.float32)

    def try_bit(index: Array, floor: Array) -> Array:
        # Floats from 2 ** -63 to 1 have bit 29 set, so the search starts at bit 28.
        higher = floor | (1 << (28 - index))
        least = lax.bitcast_convert_type(higher, jnp.float32)[:, None]
        mass = jnp.where(probs >= least, probs, 0).sum(axis=1)
        return jnp.where(mass >= target, higher, floor)

    floor = lax.fori_loop(0, 22, try_bit, lax.bitcast_convert_type(lowest, jnp.int32))
    return lax.bitcast_convert_type(floor, jnp.float32)


def with_logprobs(logits: Array, tokens: Array, num_top: int | None) -> Sampled:
    if num_top is None:
        return Sampled(tokens)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1) - total
    values, ids = lax.top_k(logits, num_top)
    return Sampled(tokens, chosen[:, 0], ids, values - total)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(5, 6))
def sample_step(
    model: Model,
    traits: Traits,
    params: Params,
    states: Array,
    normed: Array | None,
    last_token: Array,
    counts: Array | None,
    words: Array,
    packed: Array,
    mask: Array | None,
    adapters: RowAdapters | None = None,
) -> tuple[Array, Array | None, Sampled, Array | None]:
    """Computes logits from the residual stream `states` and samples a token per row. `normed` is
    the stream after the final norm, if it is already known.

    Returns the new `last_token` and `counts`, the sampled tokens, and the hidden states, or None if
    `traits.keeps_hidden` is false.
    """
    layout = settings_layout(traits, len(last_token))
    settings = settings_views(layout, packed, jnp.float32)
    hidden = final_norm(model, params, states) if normed is None else normed
    logits = head_logits(model, with_adapters(params, adapters), hidden)
    of_rows = None if counts is None else counts[settings["slots"]]
    sampled = sample(logits, settings, traits, words, of_rows, mask)
    last_token = last_token.at[settings[KEEPS]].set(sampled.tokens, mode="drop")
    if counts is not None:
        counts = counts.at[settings[KEEPS], sampled.tokens].add(PER_OUTPUT, mode="drop")
    kept = hidden.astype(jnp.float32) if traits.keeps_hidden else None
    return last_token, counts, sampled, kept
