"""The part of a step that all PyTorch runners share: sampling, and the copy of tokens to the host.

Only `TorchPendingTokens.wait` waits for the device. All other code on the host branches on host
arrays only. Values that the host does not know yet, such as the last sampled tokens, stay on the
device.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.runtime.model_runner import (
    F32,
    I32,
    BatchInputs,
    RunnerSpec,
    SamplingInputs,
    StepOutput,
)
from engine.runtime.outputs import Sampled
from engine.runtime.samplers.host_sampler import token_words
from engine.torch.execution import device_sampler
from engine.torch.execution.history import TokenHistory
from engine.torch.execution.sampler import sample
from engine.torch.kernels.base import use_triton
from engine.torch.transfer import to_device, to_host

if TYPE_CHECKING:
    from engine.torch.execution.taps import Captured


@dataclass(frozen=True, slots=True)
class StepHandle:
    """The result of `forward`, which the caller passes to `sample`."""

    logits: Tensor | None  # (R, V) float32; None: no row of this step samples a token
    hidden: Tensor | None  # (R, D) hidden states after the final norm
    finite: Tensor  # (S,) bool: whether each row is free of NaN and infinity
    captured: "Captured | None" = None  # what the taps of the step captured


@dataclass(frozen=True, slots=True)
class TorchPendingTokens:
    """The results of a step, which may still be on their way to the host."""

    sampled: Sampled  # host tensors, valid once the event `done` has occurred
    finite: Tensor
    hidden: Tensor | None
    done: torch.cuda.Event | None
    captured: "Captured | None" = None

    def wait(self) -> StepOutput:
        if self.done is not None:
            self.done.synchronize()
        sampled = self.sampled
        return StepOutput(
            tokens=sampled.tokens.numpy().astype(np.int32),
            finite=self.finite.numpy(),
            logprobs=None if sampled.logprobs is None else sampled.logprobs.numpy(),
            top_ids=None if sampled.top_ids is None else sampled.top_ids.numpy().astype(np.int32),
            top_logprobs=None if sampled.top_logprobs is None else sampled.top_logprobs.numpy(),
            hidden=None if self.hidden is None else self.hidden.numpy(),
            captured=None if self.captured is None else self.captured.rows(),
        )


class SamplingRunner:
    """Samples tokens from the logits of a `StepHandle`, which a subclass computes in `forward`."""

    def __init__(self, spec: RunnerSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._history = TokenHistory(spec.max_slots, spec.max_seq_len, device)
        # The last sampled token of each slot, and a spare slot to which padding rows write.
        self._last_token = torch.zeros(spec.max_slots + 1, dtype=torch.int64, device=device)
        self._words = to_device(token_words(spec.vocab_size), device)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @property
    def last_token(self) -> Tensor:
        """The last sampled token of each slot, on the device."""
        return self._last_token

    @torch.inference_mode()
    def logits(self, handle: StepHandle, rows: I32) -> F32:
        assert handle.logits is not None
        some = handle.logits.index_select(0, self._put(rows.astype(np.int64))).float()
        on_host = to_host(some)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return on_host.numpy()

    @torch.inference_mode()
    def sample(self, handle: StepHandle, sampling: SamplingInputs) -> TorchPendingTokens:
        if handle.logits is None:
            sampled = Sampled(torch.empty(0, dtype=torch.int64, device=self._device))
        else:
            self._history.begin(sampling)
            choose = device_sampler.sample if use_triton(handle.logits) else sample
            sampled = choose(handle.logits, sampling, self._history, self._words)
            self._remember(sampling, sampled.tokens)
        pending = self._send(sampled, handle.finite, self._hidden(handle, sampling))
        return pending if handle.captured is None else replace(pending, captured=handle.captured)

    def close(self) -> None:
        """Frees the memory on the device. The runner cannot be used afterwards."""
        del self._history, self._last_token, self._words
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _token_ids(self, inputs: BatchInputs) -> Tensor:
        """The token ids of the step, (T,). Each FROM_DEVICE in `inputs.token_ids` is replaced by
        the last token that was sampled for the sequence.
        """
        token_ids = self._put(inputs.token_ids.astype(np.int64))
        if inputs.token_ids.min(initial=0) >= 0:
            return token_ids
        slots = np.repeat(inputs.slots, np.diff(inputs.query_start)).astype(np.int64)
        return torch.where(token_ids < 0, self._last_token[self._put(slots)], token_ids)

    def _hidden(self, handle: StepHandle, sampling: SamplingInputs) -> Tensor | None:
        if handle.hidden is None or not len(sampling.hidden_rows):
            return None
        rows = self._put(sampling.hidden_rows.astype(np.int64))
        return handle.hidden.index_select(0, rows).float()

    def _remember(self, sampling: SamplingInputs, tokens: Tensor) -> None:
        slots, positions = sampling.slots, sampling.position
        kept = np.flatnonzero(sampling.keeps)
        if len(kept) < len(slots):
            slots, positions = slots[kept], positions[kept]
            tokens = tokens.index_select(0, self._put(kept))
        where = self._put(slots.astype(np.int64))
        self._last_token.index_copy_(0, where, tokens)
        if sampling.has_penalties:
            self._history.append(where, self._put(positions.astype(np.int64)), tokens)

    def _send(self, sampled: Sampled, finite: Tensor, hidden: Tensor | None) -> TorchPendingTokens:
        def host(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else to_host(tensor)

        on_host = Sampled(
            to_host(sampled.tokens),
            host(sampled.logprobs),
            host(sampled.top_ids),
            host(sampled.top_logprobs),
        )
        on_host_finite, on_host_hidden, done = to_host(finite), host(hidden), None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self._device))
        return TorchPendingTokens(on_host, on_host_finite, on_host_hidden, done)

    def _put(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)
