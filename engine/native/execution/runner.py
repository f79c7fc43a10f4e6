"""The native model runner. Its `forward` and `sample` make one C++ call each, which releases the
GIL while it runs.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.architectures.base import ModelConfig
from engine.architectures.sites import Site
from engine.runtime.model_runner import (
    F32,
    FROM_DEVICE,
    GROUPS,
    I32,
    BatchInputs,
    Bytes,
    Group,
    RunnerSpec,
    SamplingInputs,
    StepOutput,
)

if TYPE_CHECKING:
    from engine.adapters.matrices import Adapter
    from engine.native.execution.adapter_packing import NativeAdapter


class StepHandle(msgspec.Struct, frozen=True):
    """The result of `forward`, which the caller passes to `sample`. The logits themselves stay in
    the executor's memory.
    """

    finite: np.ndarray  # (S,) bool: whether each sequence's results are free of NaN and infinity
    num_logits: int
    captured: F32 | None = None  # what the taps of the step captured


class FinishedTokens(msgspec.Struct, frozen=True):
    """The sampled tokens of a step. The step has already finished, so `wait` returns at once."""

    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


class NativeRunner:
    """Runs a model on the CPU. `model` is a loaded `Model` of the compiled module; `hidden_size` is
    the width of its hidden states, and `step_kinds` are the kinds of its plan steps, in order.
    """

    def __init__(
        self,
        model: Any,
        spec: RunnerSpec,
        hidden_size: int,
        step_kinds: Sequence[str] = (),
        numerics: str = "",
        pack_adapter: "Callable[[Adapter], NativeAdapter] | None" = None,
        config: ModelConfig | None = None,
        sites: tuple[Site, ...] = (),
    ) -> None:
        """`numerics` names the settings that change what the kernels compute. `pack_adapter` packs
        an adapter for the model's matmuls.
        """
        self._pack_adapter = pack_adapter
        self._has_adapters = False
        self.config, self.sites = config, sites
        self._model = model
        self._step_kinds = step_kinds
        self._numerics = numerics
        self._spec = spec
        self._hidden_size = hidden_size
        self._last_token = np.zeros(spec.max_slots, np.int32)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def forward(self, inputs: BatchInputs) -> StepHandle:
        finite, taps, captured = np.empty(len(inputs.slots), np.uint8), inputs.taps, None
        if taps is not None:
            captured = np.zeros((taps.num_captured, taps.width), np.float32)
        self._model.forward(
            self._token_ids(inputs),
            inputs.positions,
            inputs.write_slots,
            inputs.query_start,
            inputs.num_prompt,
            inputs.block_tables,
            inputs.logit_rows,
            inputs.prefix_groups,
            inputs.prefix_blocks,
            finite,
            inputs.window_slots,
            inputs.window_tables,
            visible_end=inputs.visible_end,
            embeds=inputs.embeds,
            embed_rows=inputs.embed_rows,
            slots=inputs.slots,
            state_load=inputs.state_load,
            state_save=inputs.state_save,
            adapter_ids=self._adapter_ids(inputs),
            taps=taps,
            captured=captured,
        )
        return StepHandle(finite.view(np.bool_), len(inputs.logit_rows), captured)

    def sample(self, handle: StepHandle, sampling: SamplingInputs) -> FinishedTokens:
        if not handle.num_logits:
            none = np.empty(0, np.int32)
            return FinishedTokens(StepOutput(none, handle.finite, captured=handle.captured))
        tokens, logprobs, top_ids, top_logprobs = self._model.sample(sampling)
        keeps = sampling.keeps
        self._last_token[sampling.slots[keeps]] = tokens[keeps]
        hidden = self._hidden(sampling)
        return FinishedTokens(
            StepOutput(
                tokens, handle.finite, logprobs, top_ids, top_logprobs, hidden, handle.captured
            )
        )

    def logits(self, handle: StepHandle, rows: I32 | None = None) -> F32:
        """A copy of some rows of the last step's logits. None: all rows."""
        rows = np.arange(handle.num_logits, dtype=np.int32) if rows is None else rows
        logits = np.empty((len(rows), self._spec.vocab_size), np.float32)
        for row, values in zip(rows, logits, strict=True):
            self._model.logits(int(row), values)
        return logits

    def unembed(self, x: F32) -> F32:
        logits = np.empty((len(x), self._spec.vocab_size), np.float32)
        self._model.unembed(np.ascontiguousarray(x), logits)
        return logits

    def head_row(self, token_id: int) -> F32:
        row = np.empty(self._hidden_size, np.float32)
        self._model.head_row(token_id, row)
        return row

    @property
    def kv_identity(self) -> str:
        from engine.native import _native

        kernels = hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()
        return f"native {self._numerics} {kernels}"

    def bytes_per_block(self, group: Group) -> int:
        size: int = self._model.bytes_per_block(GROUPS.index(group))
        return size

    def read_blocks(self, group: Group, blocks: Sequence[int]) -> Callable[[], Bytes]:
        rows = np.empty((len(blocks), self.bytes_per_block(group)), np.uint8)
        self._model.read_blocks(GROUPS.index(group), np.array(blocks, np.int64), rows)
        return lambda: rows

    def write_blocks(self, group: Group, blocks: Sequence[int], rows: Bytes) -> None:
        self._model.write_blocks(GROUPS.index(group), np.array(blocks, np.int64), rows)

    def pack_adapter(self, adapter: "Adapter") -> "NativeAdapter":
        assert self._pack_adapter is not None, "this runner was built without it"
        return self._pack_adapter(adapter)

    def set_adapter(self, number: int, packed: "NativeAdapter") -> None:
        self._model.set_adapter(number, packed.sites, packed.embedding, packed.whole)
        self._has_adapters = True

    def _adapter_ids(self, inputs: BatchInputs) -> I32 | None:
        return inputs.adapter_ids if self._has_adapters and inputs.adapter_ids.any() else None

    def time_kernels(self, on: bool) -> None:
        self._model.set_timing(on)

    def kernel_seconds(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for kind, seconds in zip(self._step_kinds, self._model.op_seconds(), strict=False):
            totals[kind] = totals.get(kind, 0.0) + seconds
        return totals

    def close(self) -> None:
        """Frees the KV cache and the weights. The runner cannot be used afterwards."""
        del self._model

    def _token_ids(self, inputs: BatchInputs) -> I32:
        """The token ids of the step. Each FROM_DEVICE in `inputs.token_ids` is replaced by the last
        token that was sampled for the sequence.
        """
        if inputs.token_ids.min(initial=0) >= 0:
            return inputs.token_ids
        slots = np.repeat(inputs.slots, np.diff(inputs.query_start))
        known = inputs.token_ids != FROM_DEVICE
        return np.where(known, inputs.token_ids, self._last_token[slots]).astype(np.int32)

    def _hidden(self, sampling: SamplingInputs) -> np.ndarray | None:
        if not len(sampling.hidden_rows):
            return None
        states = np.empty((len(sampling.hidden_rows), self._hidden_size), np.float32)
        for state, row in zip(states, sampling.hidden_rows, strict=True):
            self._model.hidden(int(row), state)
        return states
