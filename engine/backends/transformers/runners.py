"""Runners for models of Transformers.

`PackedRunner` computes tokens of all sequences in one forward pass. It uses the paged KV cache of
our own runners. So prefix sharing, preemption and chunked prefill work as with them. The model only
gets tokens with their positions, and calls our attention.

`SlotRunner` computes each sequence alone, with the cache that the model makes for it. It is used
for models whose attention can't be replaced, or that have a recurrent state instead of keys and
values. A prompt is computed at once when its last chunk arrives, because some states can't be
extended by several tokens. If a sequence has no cache, all its tokens are computed again.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.backends.transformers.attention import PackedStep, ScoreParameters
from engine.backends.transformers.states import FinalStates
from engine.runtime.model_runner import (
    GPU_STEP_S,
    NULL_BLOCK,
    BatchInputs,
    RunnerConfig,
    RunnerSpec,
)
from engine.torch.execution.cache import KVShape, PagedCache
from engine.torch.execution.sampling_runner import (
    SamplingRunner,
    StepHandle,
)
from engine.torch.kernels.attention import (
    AttentionBackend,
    AttentionPlan,
)
from engine.torch.kernels.attention_heads import AttentionHeads
from engine.torch.kernels.attention_sdpa import SdpaAttention
from engine.torch.kernels.attention_triton import TritonAttention


class Attentions:
    """Attention backends for each scoring and number of heads. They are kept for all steps."""

    def __init__(
        self, shape: KVShape, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = shape
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._made: dict[tuple[ScoreParameters, int], AttentionBackend] = {}
        if device.type == "cuda":
            # cuDNN makes a plan for each new shape, which takes longer than many steps. Here, every
            # step has another shape.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def get(self, scoring: ScoreParameters, num_heads: int) -> AttentionBackend:
        key = (scoring, num_heads)
        if key not in self._made:
            self._made[key] = self._make(scoring, num_heads)
        return self._made[key]

    def _make(self, scoring: ScoreParameters, num_heads: int) -> AttentionBackend:
        shape = self._shape
        scale = shape.head_dim**-0.5 if scoring.scale is None else scoring.scale
        heads = AttentionHeads(
            num_heads, shape.num_kv_heads, shape.head_dim, scale, (scoring.window,)
        )
        kind = TritonAttention if self._device.type == "cuda" else SdpaAttention
        return kind(heads, block_size=self._block_size, dtype=self._dtype)


class PackedRunner(SamplingRunner):
    """Runs a model that already uses the attention of `attention.py`."""

    def __init__(
        self, model: Any, states: FinalStates, vocab_size: int, config: RunnerConfig, shape: KVShape
    ) -> None:
        device: torch.device = model.device
        spec = RunnerSpec.of(
            config,
            vocab_size,
            depth=0 if device.type == "cpu" else 1,
            target_step_s=None if device.type == "cpu" else GPU_STEP_S,
        )
        super().__init__(spec, device)
        self._model = model
        self._attentions = Attentions(shape, spec.block_size, model.dtype, device)
        self._cache = PagedCache(shape, spec.num_blocks, spec.block_size, device, model.dtype)
        self._states = states
        self._keeps_some = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, inputs: BatchInputs) -> StepHandle:
        positions = self._put(inputs.positions.astype(np.int64))
        write_slots = self._put(inputs.write_slots)

        def plan(scoring: ScoreParameters, num_heads: int) -> AttentionPlan:
            return self._attentions.get(scoring, num_heads).plan(inputs, positions)

        # The model must compute some logits, even if none are needed.
        rows = inputs.logit_rows if len(inputs.logit_rows) else np.zeros(1, np.int32)
        kept = self._put(rows.astype(np.int64))
        output = self._model(
            input_ids=self._token_ids(inputs)[None],
            position_ids=positions[None],
            use_cache=False,
            paged_step=PackedStep(write_slots, plan, self._cache),
            **({"logits_to_keep": kept} if self._keeps_some else {}),
        )
        states = self._states.take()[0]  # (T, D)
        finite = self._cache.guard(inputs, states, write_slots)
        if not len(inputs.logit_rows):
            return StepHandle(None, None, finite)
        logits: Tensor = output.logits[0]
        if not self._keeps_some:
            logits = logits.index_select(0, kept)
        return StepHandle(logits.float(), states.index_select(0, kept), finite)

    def close(self) -> None:
        del self._model, self._cache, self._states
        super().close()


# Names that model families use for the cache. A forward pass returns it, and the next one takes it
# as an argument of the same name.
_CACHES = ("past_key_values", "cache_params", "state", "rnn_state", "mems")


@dataclass(slots=True)
class SequenceState:
    """The token ids of a sequence so far, and the model's cache for the first `num_computed` of
    them.
    """

    ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    cache: tuple[str, Any] | None = None  # (argument name, cache)

    def forget(self) -> None:
        self.num_computed, self.cache = 0, None

    def extend(self, start: int, ids: list[int]) -> None:
        """Set the ids from position `start` on. After a failed step, `start` may be less than the
        number of ids.
        """
        assert start <= len(self.ids), (start, len(self.ids))
        self.ids[start:] = ids
        if self.num_computed > start:
            self.forget()


class SlotRunner(SamplingRunner):
    """Computes each sequence alone. If `keeps_state` is false, the model's cache can't be used, so
    every step computes the whole sequence again.
    """

    def __init__(
        self,
        model: Any,
        states: FinalStates,
        vocab_size: int,
        config: RunnerConfig,
        keeps_state: bool = True,
    ) -> None:
        spec = RunnerSpec.of(
            config,
            vocab_size,
            depth=0,
        )
        super().__init__(spec, model.device)
        self._model = model
        self._keeps_state = keeps_state
        self._keeps_some = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._states = states
        self._slots = [SequenceState() for _ in range(spec.max_slots)]

    @torch.inference_mode()
    def forward(self, inputs: BatchInputs) -> StepHandle:
        self._free_all_but(inputs)
        logits: list[Tensor] = []
        hidden: list[Tensor] = []
        finite = torch.ones(len(inputs.slots), dtype=torch.bool, device=self._device)
        for row, slot in enumerate(self._rows(inputs)):
            first, end = inputs.query_start[row : row + 2]
            ids = inputs.token_ids[first:end].tolist()
            slot.extend(int(inputs.seq_lens[row]) - len(ids), ids)
            wanted = inputs.logit_rows[(first <= inputs.logit_rows) & (inputs.logit_rows < end)]
            if not len(wanted):
                continue
            row_logits, row_states = self._compute(slot, int(end - wanted[0]))
            from_end = self._put(wanted.astype(np.int64) - int(end))
            logits.append(row_logits[from_end].float())
            hidden.append(row_states[from_end])
            finite[row] = torch.isfinite(row_states.sum(dtype=torch.float32))
        if not logits:
            return StepHandle(None, None, finite)
        return StepHandle(torch.cat(logits), torch.cat(hidden), finite)

    def close(self) -> None:
        del self._model, self._slots, self._states
        super().close()

    def _rows(self, inputs: BatchInputs) -> list[SequenceState]:
        """The slot of each row. A row that writes to the null block is padding and gets an empty
        slot, whatever its slot number is.
        """
        firsts = inputs.write_slots[inputs.query_start[:-1]] // self._spec.block_size
        return [
            SequenceState() if block == NULL_BLOCK else self._slots[slot]
            for slot, block in zip(inputs.slots, firsts, strict=True)
        ]

    def _free_all_but(self, inputs: BatchInputs) -> None:
        """Free the caches of slots that are not in this step. Their sequences have ended, or can be
        computed again.
        """
        present = set(inputs.slots.tolist())
        for number, slot in enumerate(self._slots):
            if number not in present:
                slot.forget()

    def _compute(self, slot: SequenceState, num_logits: int) -> tuple[Tensor, Tensor]:
        """Compute all ids of a slot that are not in its cache. Returns the logits (P, V) of at
        least the last `num_logits` of them, and the hidden states (P, D) of all of them.
        """
        if not self._keeps_state or len(slot.ids) - slot.num_computed > 1:
            slot.forget()
        ids = torch.tensor([slot.ids[slot.num_computed :]], device=self._device)
        given: dict[str, Any] = {"logits_to_keep": num_logits} if self._keeps_some else {}
        if slot.cache is not None:
            name, cache = slot.cache
            given[name] = cache
        output = self._model(input_ids=ids, use_cache=self._keeps_state, **given)
        if self._keeps_state:
            slot.cache = find_cache(output)
            slot.num_computed = len(slot.ids)
        return output.logits[0], self._states.take()[0]


def find_cache(output: Any) -> tuple[str, Any]:
    """The cache in the output of a forward pass, and the name of the argument that takes it in the
    next pass.
    """
    for name in _CACHES:
        cache = output.get(name)
        if cache is not None:
            return name, cache
    raise LookupError(f"none of {', '.join(_CACHES)} is among {', '.join(output.keys())}")
