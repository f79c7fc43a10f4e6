"""`JAXRunner`: the seam's two calls, each of them one compiled function over donated state.

Nothing here waits for the device but `JAXPendingTokens.wait`. A call returns as soon as its work is
queued; the cache and the slots' state that it gave are the next call's input, in the same memory.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from engine.backends.custom.frameworks.jax.execution.buckets import Buckets, packed_step
from engine.backends.custom.frameworks.jax.execution.draws import (
    Traits,
    packed_draws,
    traits_of,
    unpacked_draws,
)
from engine.backends.custom.frameworks.jax.execution.packing import padded
from engine.backends.custom.frameworks.jax.execution.sampler import (
    IN_PROMPT,
    PER_OUTPUT,
    Sampled,
    sample,
)
from engine.backends.custom.frameworks.jax.execution.sharding import CACHE_SPEC, put
from engine.backends.custom.frameworks.jax.execution.step import StepProgram, forward
from engine.backends.custom.frameworks.jax.kernels.attention import attention_backend
from engine.backends.custom.frameworks.jax.kernels.attention_xla import CHUNK
from engine.backends.custom.frameworks.jax.layers.linear import Params
from engine.backends.custom.frameworks.jax.models.base import Model, final_norm, head_logits
from engine.backends.custom.runtime.noise import token_words
from engine.backends.custom.runtime.seam import (
    I32,
    BatchInputs,
    RunnerConfig,
    RunnerSpec,
    SamplingInputs,
    StepOutput,
)

# Where a step's activations leave the second-level cache, a larger one gains nothing.
MOST_CPU_TOKENS = 512
TARGET_GPU_STEP_S = 0.2


@dataclass(frozen=True, slots=True)
class StepHandle:
    """What `sample` needs of a `forward`."""

    states: Array  # (T, D), those that logits are made of first
    finite: Array  # (T,) of tokens
    query_start: I32


@dataclass(frozen=True, slots=True)
class JAXPendingTokens:
    """A step's results on their way to the host."""

    sampled: Sampled | None  # None: no row samples
    hidden: Array | None  # (R, D)
    finite: Array
    query_start: I32
    sampling: SamplingInputs

    def wait(self) -> StepOutput:
        # Behind the last row's tokens there is padding, of which nothing is known.
        of_tokens = np.asarray(self.finite)[: self.query_start[-1]]
        finite = np.logical_and.reduceat(of_tokens, self.query_start[:-1])
        sampled, count = self.sampled, len(self.sampling.slots)
        if sampled is None:
            return StepOutput(np.empty(0, np.int32), finite)
        tokens = np.asarray(sampled.tokens)[:count]
        hidden = None
        if self.hidden is not None:
            hidden = np.asarray(self.hidden)[self.sampling.hidden_rows]
        if sampled.logprobs is None:
            return StepOutput(tokens, finite, hidden=hidden)
        num_top = int(self.sampling.num_logprobs.max())
        return StepOutput(
            tokens,
            finite,
            np.asarray(sampled.logprobs)[:count],
            np.asarray(sampled.top_ids)[:count, :num_top],
            np.asarray(sampled.top_logprobs)[:count, :num_top],
            hidden,
        )


class JAXRunner:
    def __init__(
        self,
        model: Model,
        params: Params,
        config: RunnerConfig,
        device: jax.Device,
        mesh: Mesh | None,
    ) -> None:
        on_gpu = device.platform == "gpu"
        self._spec = RunnerSpec(
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_slots=config.max_slots,
            max_seq_len=config.max_seq_len,
            vocab_size=model.config.vocab_size,
            depth=1,
            most_step_tokens=None if on_gpu else MOST_CPU_TOKENS,
            target_step_s=TARGET_GPU_STEP_S if on_gpu else None,
        )
        self._params = params
        self._put = partial(put, mesh=mesh, device=device)
        self._buckets = Buckets(config.max_slots, config.block_size, config.max_seq_len, CHUNK)
        dtype = params["norm"]["weight"].dtype
        self._caches = [self._pages(model, dtype) for _ in range(model.config.num_layers)]
        self._last_token = self._put(np.zeros(config.max_slots, np.int32), P())
        self._counts: Array | None = None  # (max_slots, V), made for the first row with penalties
        self._words = self._put(token_words(model.config.vocab_size), P())
        num_slots = config.num_blocks * config.block_size
        attention = attention_backend(config.attention, model.config, device.platform, num_slots)
        self._program = StepProgram(model, attention, config.block_size, mesh)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def forward(self, inputs: BatchInputs) -> StepHandle:
        bucket = self._buckets.of(inputs)
        self._caches, states, finite = forward(
            self._program,
            bucket,
            self._params,
            self._caches,
            self._last_token,
            packed_step(inputs, bucket),
        )
        return StepHandle(states, finite, inputs.query_start)

    def sample(self, handle: StepHandle, sampling: SamplingInputs) -> JAXPendingTokens:
        sampled, hidden = None, None
        if len(sampling.slots):
            traits = traits_of(sampling, self._spec.vocab_size)
            packed = packed_draws(sampling, traits, self._spec.max_slots)
            mask = None if sampling.mask is None else padded(sampling.mask, traits.num_rows)
            counts = self._histories(sampling) if sampling.has_penalties else None
            self._last_token, counts, sampled, hidden = sample_step(
                self._program.model,
                traits,
                self._params,
                handle.states[: traits.num_rows],
                self._last_token,
                counts,
                self._words,
                packed,
                mask,
            )
            self._counts = self._counts if counts is None else counts
        for array in jax.tree.leaves((sampled, hidden, handle.finite)):
            array.copy_to_host_async()
        return JAXPendingTokens(sampled, hidden, handle.finite, handle.query_start, sampling)

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        jax.block_until_ready((self._caches, self._last_token))

    def close(self) -> None:
        """Free the model and the cache; the runner cannot be used again."""
        del self._params, self._caches, self._last_token, self._counts, self._words

    def _pages(self, model: Model, dtype: jnp.dtype) -> Array:
        """A layer's keys and values: zeros, since NaN would show through a mask."""
        num_slots = self._spec.num_blocks * self._spec.block_size
        shape = (num_slots, 2, model.config.num_kv_heads, model.config.head_dim)
        return self._put(np.zeros(shape, dtype), CACHE_SPEC)

    def _histories(self, sampling: SamplingInputs) -> Array:
        """The slots' counts, with the histories that came with the step."""
        counts, size = self._counts, self._spec.vocab_size
        if counts is None:
            counts = self._put(np.zeros((self._spec.max_slots, size), np.int32), P())
        for index, slot in enumerate(sampling.history_slots):
            start, end = sampling.history_start[index : index + 2]
            middle = start + sampling.history_num_prompt[index]
            row = PER_OUTPUT * np.bincount(sampling.history_tokens[middle:end], minlength=size)
            row[sampling.history_tokens[start:middle]] += IN_PROMPT
            counts = set_row(counts, np.int32(slot), row.astype(np.int32))
        return counts


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4, 5))
def sample_step(
    model: Model,
    traits: Traits,
    params: Params,
    states: Array,
    last_token: Array,
    counts: Array | None,
    words: Array,
    packed: Array,
    mask: Array | None,
) -> tuple[Array, Array | None, Sampled, Array | None]:
    """The second half of a step: the slots' state after it, the tokens, hidden states."""
    draws = unpacked_draws(packed, traits)
    hidden = final_norm(model, params, states)
    logits = head_logits(params, hidden)
    of_rows = None if counts is None else counts[draws.slots]
    sampled = sample(logits, draws, traits, words, of_rows, mask)
    last_token = last_token.at[draws.drawn_slots].set(sampled.tokens, mode="drop")
    if counts is not None:
        counts = counts.at[draws.drawn_slots, sampled.tokens].add(PER_OUTPUT, mode="drop")
    kept = hidden.astype(jnp.float32) if traits.keeps_hidden else None
    return last_token, counts, sampled, kept


@partial(jax.jit, donate_argnums=0)
def set_row(counts: Array, slot: Array, row: Array) -> Array:
    return counts.at[slot].set(row)
