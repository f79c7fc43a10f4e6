"""Sampling as CUDA graphs. To sample a step, the host copies the step's settings to the device in
one copy and launches one graph.

The settings of all steps are at the same address, so one graph per step size and `Kind` serves any
mix of requests. The token mask of a grammar is copied with the settings, after the host has
launched the forward pass.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from engine.runners.layout import Layout
from engine.runners.settings import KEEPS
from engine.runtime.model_runner import SAMPLE, SamplingInputs
from engine.torch.execution.device_sampler import (
    MASK,
    PADS,
    Kind,
    choose,
    kind_of,
    settings_arrays,
    settings_sizes,
    settings_views,
)
from engine.torch.execution.graphs import Capturer
from engine.torch.execution.history import TokenHistory
from engine.torch.execution.staging import PinnedRing
from engine.torch.kernels.sampling import greedy

PLAIN = Kind(adjusts=False, masks=False, samples=False)
MAX_BIASES = 1024  # max logit biases in a step; a step with more biases is sampled without a graph


class SampledStep(Protocol):
    """The logits of a step and the tensors for its sampled tokens. After the graph `forward` is
    captured, the addresses of these tensors stay the same.
    """

    logits: Tensor | None  # (R, V)
    forward: torch.cuda.CUDAGraph | None
    sample_graphs: dict[Kind, torch.cuda.CUDAGraph]

    @property
    def tokens(self) -> Tensor: ...  # (R,) int32

    @property
    def sample_slots(self) -> Tensor: ...  # (R,) int32


class GraphSampler:
    def __init__(
        self,
        max_slots: int,
        vocab_size: int,
        history: TokenHistory,
        last_token: Tensor,
        words: Tensor,
        capturer: Capturer,
    ) -> None:
        device = words.device
        self._spare_slot = max_slots
        self._history, self._last_token, self._words = history, last_token, words
        self._capturer = capturer
        sizes = settings_sizes(max_slots, MAX_BIASES)
        self._layout = Layout(sizes, PADS | {KEEPS: self._spare_slot}, last=MASK)
        longest = self._layout.size + max_slots * -(-vocab_size // 32)
        self._buffer = torch.zeros(longest, dtype=torch.int32, device=device)
        self._settings = settings_views(self._layout, self._buffer)
        self._inbound = PinnedRing()
        self._last: tuple[SamplingInputs, Kind | None] | None = None

    def kind_of(self, sampling: SamplingInputs) -> Kind | None:
        """The kind of a step's sampling, or None if no graph can sample the step. This is the case
        if the step needs logprobs or hidden states, or has settings that do not fit the buffer.
        """
        if self._last is not None and sampling.mask is None:
            last, kind = self._last
            # Consecutive decode-only steps share the arrays of settings. Only positions change.
            if last.temperature is sampling.temperature and last.mask is None:
                return kind
        kind = self._find_kind(sampling)
        self._last = sampling, kind
        return kind

    def sample(self, step: SampledStep, kind: Kind, sampling: SamplingInputs) -> None:
        """Samples the tokens of a step and writes them to the start of `step.tokens`."""
        self._history.begin(sampling)
        if kind != PLAIN:
            self._send(sampling)
        graph = step.sample_graphs.get(kind)
        if graph is not None:
            graph.replay()
            return
        self.run(step, kind)
        if step.forward is not None:
            self.capture(step, kind)

    def capture(self, step: SampledStep, kind: Kind) -> None:
        step.sample_graphs[kind] = self._capturer.capture(lambda: self.run(step, kind))

    def _find_kind(self, sampling: SamplingInputs) -> Kind | None:
        if (
            len(sampling.slots) > self._spare_slot
            or len(sampling.bias_rows) > MAX_BIASES
            or len(sampling.hidden_rows)
            or (sampling.num_logprobs >= 0).any()
        ):
            return None
        kind = kind_of(sampling)
        if kind == PLAIN and (sampling.forced != SAMPLE).any():
            # Plain sampling does not copy settings to the device, but forced tokens are settings.
            return replace(PLAIN, samples=True)
        return kind

    def _send(self, sampling: SamplingInputs) -> None:
        arrays = settings_arrays(sampling, self._history)
        length = self._layout.length(arrays)
        pinned = self._inbound.take(length)
        self._layout.write(pinned.array, arrays)
        self._buffer[:length].copy_(pinned.tensor[:length], non_blocking=True)
        pinned.copied.record()
        self._inbound.give_back(pinned)

    def run(self, step: SampledStep, kind: Kind) -> None:
        """Samples with the settings that were sent last, without a graph."""
        assert step.logits is not None
        if kind == PLAIN:
            tokens, slots = greedy(step.logits), step.sample_slots.long()
        else:
            tokens = choose(step.logits, self._settings, kind, self._history.tokens, self._words)
            slots = self._settings[KEEPS][: len(tokens)].long()
        step.tokens.copy_(tokens)
        self._last_token[slots] = tokens
        if kind.adjusts:
            positions = self._settings["position"][: len(tokens)].long()
            self._history.append(slots, positions, tokens)
