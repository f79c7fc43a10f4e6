"""`SlotRunner`: computes each sequence alone, with the cache that the model makes for it.

It is used for models whose attention can't be replaced, or that have a recurrent state instead of
keys and values. A prompt is computed at once when its last chunk arrives, because some states can't
be extended by several tokens. If a sequence has no cache, all its tokens are computed again.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.execution.sampling_runner import (
    SamplingRunner,
    StepHandle,
)
from engine.backends.custom.runtime.model_runner import (
    NULL_BLOCK,
    BatchInputs,
    RunnerConfig,
    RunnerSpec,
)
from engine.backends.transformers.states import FinalStates

# Names that model families use for the cache. A forward pass returns it, and the next one takes it
# as an argument of the same name.
_CACHES = ("past_key_values", "cache_params", "state", "rnn_state", "mems")


@dataclass(slots=True)
class Slot:
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
        self._slots = [Slot() for _ in range(spec.max_slots)]

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

    def _rows(self, inputs: BatchInputs) -> list[Slot]:
        """The slot of each row. A row that writes to the null block is padding and gets an empty
        slot, whatever its slot number is.
        """
        firsts = inputs.write_slots[inputs.query_start[:-1]] // self._spec.block_size
        return [
            Slot() if block == NULL_BLOCK else self._slots[slot]
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

    def _compute(self, slot: Slot, num_logits: int) -> tuple[Tensor, Tensor]:
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
