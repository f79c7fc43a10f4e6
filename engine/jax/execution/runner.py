"""The JAX model runner. Its `forward` and `sample` each call one compiled function.

A call returns as soon as its work is queued. Only `JAXPendingTokens.wait` waits for the device. The
KV cache and the state of the slots are donated to the compiled function, which updates them in
place and returns them for the next call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from engine.architectures.base import ModelConfig
from engine.architectures.sites import Site, sites_of
from engine.jax.execution.blocks import (
    block_slots,
    cache_shapes,
    gather_slots,
    rows_of,
    scatter_slots,
    values_of,
)
from engine.jax.execution.buckets import (
    Buckets,
    packed_step,
    padded_rows,
)
from engine.jax.execution.programs import (
    StepProgram,
    forward,
    row_logits,
    set_row,
)
from engine.jax.execution.sampler import (
    IN_PROMPT,
    PER_OUTPUT,
    sample_step,
)
from engine.jax.execution.sampling_traits import (
    Settings,
    packed_settings,
    traits_of,
)
from engine.jax.execution.sharding import CACHE_SPEC, home
from engine.jax.kernels.attention import attention_backend
from engine.jax.kernels.attention_xla import CHUNK
from engine.jax.layers.adapted import RowAdapters
from engine.jax.layers.linear import Params
from engine.jax.models.base import Model
from engine.runtime.model_runner import (
    F32,
    GPU_STEP_S,
    GROUPS,
    I32,
    BatchInputs,
    Bytes,
    Group,
    RunnerConfig,
    RunnerSpec,
    SamplingInputs,
    StepOutput,
)
from engine.runtime.outputs import Sampled, step_output
from engine.runtime.samplers.host_sampler import histories, token_words

if TYPE_CHECKING:
    from engine.adapters.matrices import Adapter
    from engine.jax.execution.adapter_stacks import JAXAdapter, JAXAdapters
    from engine.jax.execution.taps import Captured

# Max tokens of a step on a CPU. The activations of larger steps do not fit the L2 cache, so larger
# steps are not faster per token.
MOST_CPU_TOKENS = 512


@dataclass(frozen=True, slots=True)
class StepHandle:
    """The result of `forward`, which the caller passes to `sample`."""

    states: Array  # (T, D) the residual stream; tokens whose logits are needed come first
    finite: Array  # (T,) bool: whether each token's residual stream is finite
    query_start: I32
    adapters: RowAdapters | None = None  # of the tokens whose logits are needed
    captured: "Captured | None" = None  # what the taps of the step captured
    normed: Array | None = None  # with taps: the states after the final norm


@dataclass(frozen=True, slots=True)
class JAXPendingTokens:
    """The results of a step, which may still be on their way to the host."""

    sampled: Sampled | None  # None: no row of this step samples a token
    hidden: Array | None  # (R, D)
    finite: Array
    query_start: I32
    sampling: SamplingInputs
    captured: "Captured | None" = None

    def wait(self) -> StepOutput:
        sampled, hidden, finite = jax.tree.map(np.asarray, (self.sampled, self.hidden, self.finite))
        output = step_output(sampled, hidden, finite, self.query_start, self.sampling)
        return output if self.captured is None else replace(output, captured=self.captured.rows())


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
        self._spec = RunnerSpec.of(
            config,
            model.config.vocab_size,
            depth=1,
            max_step_tokens=None if on_gpu else MOST_CPU_TOKENS,
            target_step_s=GPU_STEP_S if on_gpu else None,
            window=model.config.window,
        )
        self._params, tree = jax.tree.flatten(params)  # flattened once rather than in every step
        # The parameters that `sample` needs. Those of the layers are left out, because each array
        # argument of a call costs host time.
        self._ends = {name: part for name, part in params.items() if name != "layers"}
        self._home = home(P(), mesh, device)
        self._buckets = Buckets(config.max_slots, config.block_size, config.max_seq_len, CHUNK)
        num_slots = config.num_blocks * config.block_size
        dtype, pages = params["norm"]["weight"].dtype, home(CACHE_SPEC, mesh, device)
        # The KV cache of each layer.
        self._caches = [
            jnp.zeros(shape, dtype, device=pages) for shape in cache_shapes(model.config, config)
        ]
        places = model.config.cache_places(config.num_window_blocks > 0)
        # The layers whose blocks are in each group.
        self._layers: dict[Group, list[int]] = {
            group: [i for i, (cache, _) in enumerate(places) if cache == index]
            for index, group in enumerate(GROUPS)
        }
        self._last_token = jnp.zeros(config.max_slots, jnp.int32, device=self._home)
        # (max_slots, V) token counts; allocated when a request first uses penalties.
        self._counts: Array | None = None
        self._words = jax.device_put(token_words(model.config.vocab_size), self._home)
        attention = attention_backend(config.attention, model.config, device.platform, num_slots)
        self._program = StepProgram(model, tree, attention, config.block_size, mesh)
        self._settings: Settings | None = None  # the sampling settings of the last step
        self._adapters: JAXAdapters | None = None  # made for the first adapter

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def forward(self, inputs: BatchInputs) -> StepHandle:
        bucket = self._buckets.of(inputs)
        packed = packed_step(inputs, bucket)
        of_tokens = of_logits = None
        if self._adapters is not None and inputs.adapter_ids.any():
            of_tokens = self._adapters.of_tokens(inputs, bucket.num_tokens)
            of_logits = self._adapters.of_logits(inputs, bucket.num_tokens)
        if inputs.taps is not None:
            # Imported here, because few servers are asked for activations.
            from engine.jax.execution.taps import forward_with_taps

            state = (self._params, self._caches, self._last_token)
            self._caches, handle = forward_with_taps(
                self._program, bucket, *state, packed, inputs, of_tokens
            )
            return replace(handle, adapters=of_logits)
        self._caches, states, finite = forward(
            self._program, bucket, self._params, self._caches, self._last_token, packed, of_tokens
        )
        return StepHandle(states, finite, inputs.query_start, of_logits)

    def pack_adapter(self, adapter: "Adapter") -> "JAXAdapter":
        return self._with_adapters().pack(adapter)

    def set_adapter(self, number: int, packed: "JAXAdapter") -> None:
        self._with_adapters().set(number, packed)

    def _with_adapters(self) -> "JAXAdapters":
        if self._adapters is None:
            from engine.jax.execution.adapter_stacks import JAXAdapters

            self._adapters = JAXAdapters(self._caches[0].dtype, self._home)
        return self._adapters

    def logits(self, handle: StepHandle, rows: I32) -> F32:
        # Rows are padded, because a version of `row_logits` is compiled for each number of rows.
        padded = np.pad(rows, (0, padded_rows(len(rows)) - len(rows)))
        adapters = handle.adapters
        if adapters is not None:
            adapters = adapters._replace(places=adapters.places[padded])
        logits = row_logits(self._program.model, self._ends, handle.states[padded], adapters)
        return np.asarray(logits)[: len(rows)]

    def sample(self, handle: StepHandle, sampling: SamplingInputs) -> JAXPendingTokens:
        sampled, hidden = None, None
        if len(sampling.slots):
            _, traits, packed = self._settings_of(sampling)
            mask, padding = sampling.mask, traits.num_rows - len(sampling.slots)
            if mask is not None:
                mask = np.pad(mask, ((0, padding), (0, 0)))
            counts = self._histories(sampling) if sampling.has_penalties else None
            states, count, adapters = handle.states, traits.num_rows, handle.adapters
            if adapters is not None:
                adapters = adapters._replace(places=adapters.places[:count])
            self._last_token, counts, sampled, hidden = sample_step(
                self._program.model,
                traits,
                self._ends,
                states if states.shape[0] == count else states[:count],
                None if handle.normed is None else handle.normed[:count],
                self._last_token,
                counts,
                self._words,
                packed,
                mask,
                adapters,
            )
            self._counts = self._counts if counts is None else counts
        for array in (*(sampled or ()), hidden, handle.finite):
            if array is not None:
                array.copy_to_host_async()
        return JAXPendingTokens(
            sampled, hidden, handle.finite, handle.query_start, sampling, handle.captured
        )

    @property
    def config(self) -> ModelConfig:
        return self._program.model.config

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        return sites_of(self.config)

    def unembed(self, x: F32) -> F32:
        padded = np.pad(x, ((0, padded_rows(len(x)) - len(x)), (0, 0)))
        streams = jnp.asarray(padded, self._ends["norm"]["weight"].dtype)
        return np.asarray(row_logits(self._program.model, self._ends, streams))[: len(x)]

    def head_row(self, token_id: int) -> F32:
        head = self._ends["head" if "head" in self._ends else "embed"]["weight"]
        row = np.asarray(head[token_id], np.float32) / self.config.logits_scaling
        return row * np.asarray(self._ends["norm"]["weight"], np.float32)

    def input_attribution(
        self, token_ids: Sequence[int], target: int | None, position: int
    ) -> tuple[int, F32]:
        from engine.jax.execution.taps import input_x_gradient

        # Padding comes after the position, so no earlier token sees it.
        padded = np.zeros(max(16, 1 << position.bit_length()), np.int32)
        padded[: position + 1] = token_ids[: position + 1]
        params = jax.tree.unflatten(self._program.tree, self._params)
        wanted = np.int32(-1 if target is None else target)
        shares, chosen = input_x_gradient(
            self._program.model, params, padded, np.int32(position), wanted
        )
        return int(chosen), np.asarray(shares)[: position + 1]

    @property
    def kv_identity(self) -> str:
        attention = type(self._program.attention).__name__
        return f"jax {jax.__version__} {self._home} {self._caches[0].dtype} {attention}"

    def bytes_per_block(self, group: Group) -> int:
        size = self._spec.block_size
        caches = [self._caches[i] for i in self._layers[group]]
        return sum(size * each.nbytes // each.shape[0] for each in caches)

    def read_blocks(self, group: Group, blocks: Sequence[int]) -> Callable[[], Bytes]:
        caches = [self._caches[i] for i in self._layers[group]]
        slots = block_slots(blocks, self._spec.block_size)
        found = gather_slots(caches, slots)
        for array in found:
            array.copy_to_host_async()
        return lambda: rows_of(found, len(blocks), self._spec.block_size)

    def write_blocks(self, group: Group, blocks: Sequence[int], rows: Bytes) -> None:
        layers, size = self._layers[group], self._spec.block_size
        caches = [self._caches[i] for i in layers]
        slots = block_slots(blocks, size)
        values = values_of(rows, caches, size, len(slots))
        for i, cache in zip(layers, scatter_slots(caches, slots, values), strict=True):
            self._caches[i] = cache

    def wait(self) -> None:
        """Waits until the device has finished all queued work."""
        jax.block_until_ready((self._caches, self._last_token))

    def close(self) -> None:
        """Frees the model and the KV cache. The runner cannot be used afterwards."""
        del self._params, self._ends, self._caches, self._last_token, self._counts, self._words

    def _settings_of(self, sampling: SamplingInputs) -> Settings:
        """The sampling settings on the device. A greedy step that has the same arrays as the last
        step reuses the last step's settings.
        """
        last = self._settings
        if last is None or last[0] is not sampling.temperature or last[1].samples:
            traits = traits_of(sampling, self._spec.vocab_size)
            packed = packed_settings(sampling, traits, self._spec.max_slots)
            last = (sampling.temperature, traits, jax.device_put(packed, self._home))
            self._settings = last
        return last

    def _histories(self, sampling: SamplingInputs) -> Array:
        """The token counts of all slots, (max_slots, V). If this step brings the token histories of
        new sequences, their counts are set first.
        """
        counts, size = self._counts, self._spec.vocab_size
        if counts is None:
            counts = jnp.zeros((self._spec.max_slots, size), jnp.int32, device=self._home)
        for slot, in_prompt, in_output in histories(sampling, size):
            row = IN_PROMPT * in_prompt + PER_OUTPUT * in_output
            counts = set_row(counts, np.int32(slot), row)
        return counts
