"""`CudaRunner` runs steps as CUDA graphs over static buffers, with one copy in and one copy out.

Decode-only steps and small steps with prefill are padded to a size that has a graph. Larger steps
launch their kernels one by one, because the host launches these kernels faster than they run. All
graphs read their arrays from one device buffer. A graph serves sequences of any length.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.runtime.model_runner import (
    F32,
    GPU_STEP_S,
    I32,
    BatchInputs,
    RunnerConfig,
    SamplingInputs,
)
from engine.torch.device import prefer_cublaslt
from engine.torch.execution.adapter_stacks import FEW_ADAPTERS
from engine.torch.execution.device_sampler import Kind
from engine.torch.execution.graphs import Capturer
from engine.torch.execution.runner import CachedStep, TorchRunner
from engine.torch.execution.sampling_graphs import PLAIN, GraphSampler
from engine.torch.execution.sampling_runner import (
    StepHandle,
    TorchPendingTokens,
)
from engine.torch.execution.staging import (
    TILES_OF_ADAPTERS,
    BufferedStep,
    CudaHandle,
    CudaPendingTokens,
    PinnedRing,
    StepBuffers,
)
from engine.torch.execution.step_sizes import Size, StepSizes
from engine.torch.kernels.attention_triton import TritonAttention
from engine.torch.kernels.fp8 import dense_tables
from engine.torch.kernels.skinny import MAX_ROWS
from engine.torch.kernels.tokens import guard, resolve_tokens
from engine.torch.layers.invariant_linear import choose_kernels
from engine.torch.layers.scans import Rows
from engine.torch.models.base import Decoder
from engine.torch.transfer import to_device
from engine.torch.warming import warm

if TYPE_CHECKING:
    from engine.torch.execution.taps import Shapes

MAX_TAPPED = 16  # sizes of steps with taps whose graphs are kept


class CudaRunner(TorchRunner):
    def __init__(
        self, model: Decoder, config: RunnerConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(model, config, device, dtype)
        assert isinstance(self._attention, TritonAttention), self._attention
        self._lists = self._attention
        if device.type == "cuda":
            # For the matrices of Llama models on an H200, cuBLASLt takes up to a third less time
            # than cuBLAS, and at most a tenth more.
            prefer_cublaslt()
        self._angles = model.rotary_tables(config.max_seq_len)
        self._max_batch_tokens = config.max_batch_tokens
        self._is_invariant = config.numerics == "invariant"
        self._sizes = StepSizes(config, self._lists, has_state=self._spec.has_state)
        self._spec = replace(
            self._spec, target_step_s=GPU_STEP_S, paces=True, step_sizes=self._sizes.tokens
        )
        num_caches = len(self._cache.caches)
        self._buffers = StepBuffers(config, self._lists, self._sizes, num_caches, device)
        self._lists.reserve(config.max_slots, device)
        self._steps: dict[Size, BufferedStep] = {}
        self._adapters_version = 0  # of the adapters whose addresses are in graphs
        self._capturer = Capturer(device)
        self._outbound = PinnedRing()
        self._sampler = GraphSampler(
            config.max_slots,
            self._spec.vocab_size,
            self._history,
            self._last_token,
            self._words,
            self._capturer,
        )

    @torch.inference_mode()
    def forward(self, inputs: BatchInputs) -> CudaHandle | StepHandle:  # type: ignore[override]
        # Steps with images have no graphs, and neither has decode if RoPE depends on the images.
        if inputs.embeds is not None or inputs.rope_positions is not None:
            return super().forward(inputs)
        if inputs.taps is not None and self._num_adapters(inputs):
            return super().forward(inputs)
        size, tapping = self._sizes.padded(inputs, self._num_adapters(inputs)), None
        if inputs.taps is not None:
            from engine.torch.execution.taps import StepTapping

            tapping = StepTapping(inputs.taps)
            size = None if size is None else self._tapped_size(size, tapping.shapes)
        step = self._step(inputs, size) if size is not None else self._exact_step(inputs)
        if tapping is not None:
            step.taps = tapping.put(step.taps, self.sites, self._device)
        step.num_uses += 1
        self._states.load(inputs)
        if step.forward is None:
            has_state, is_new = self._spec.has_state, step.num_uses == 1
            captures = size is not None and not (is_new and (has_state or not size.only_decodes))
            # A step that changes states must not run twice: the graph is replayed below.
            if not (captures and has_state):
                self._compute(step)
            if captures:
                self.capture(step.size, (PLAIN,))
        if step.forward is not None:
            step.forward.replay()
        self._states.save(inputs)
        captured = None if tapping is None else tapping.captured(step.taps)
        return CudaHandle(step, len(inputs.slots), len(inputs.logit_rows), captured)

    def _tapped_size(self, size: Size, shapes: "Shapes") -> Size:
        """The size of a step with taps. Only the last few of such sizes keep their graphs."""
        tapped = replace(size, taps=shapes)
        if tapped not in self._steps:
            for oldest in [each for each in self._steps if each.taps][:-MAX_TAPPED]:
                del self._steps[oldest]
        return tapped

    def logits(self, handle: CudaHandle | StepHandle, rows: I32) -> F32:
        if isinstance(handle, StepHandle):
            return super().logits(handle, rows)
        step = handle.step
        return super().logits(StepHandle(step.logits, None, step.results), rows)

    @torch.inference_mode()
    def sample(  # type: ignore[override]
        self, handle: CudaHandle | StepHandle, sampling: SamplingInputs
    ) -> "CudaPendingTokens | TorchPendingTokens":
        if isinstance(handle, StepHandle):
            return super().sample(handle, sampling)
        if handle.num_samples:
            kind = self._sampler.kind_of(sampling)
            if kind is None:
                return super().sample(self._plain_handle(handle, sampling), sampling)
            self._sampler.sample(handle.step, kind, sampling)
        return self._send_results(handle)

    def warm(self) -> None:
        if self._is_invariant:
            tokens, rows = self._sizes.token_counts(), self._sizes.rows
            choose_kernels(self._model, self._model.head, tokens, rows)
        warm(self, self._device, self._max_batch_tokens)

    def sizes(self) -> Iterator[Size]:
        """The sizes of all steps that have graphs."""
        return self._sizes.with_graphs()

    @torch.inference_mode()
    def prepare(self, inputs: BatchInputs, size: Size | None, kinds: Iterable[Kind] = ()) -> None:
        """Runs a step of this size, and sampling of these kinds. None: a step without a graph."""
        step = self._exact_step(inputs) if size is None else self._step(inputs, size)
        self._compute(step)
        for kind in kinds:
            self._sampler.run(step, kind)

    @torch.inference_mode()
    def capture(self, size: Size, kinds: Iterable[Kind]) -> None:
        """Captures forward pass and sampling as CUDA graphs. A step of this size has run before.
        The capture allocates new output tensors, which are empty until the graph is replayed.
        """
        step = self._steps[size]
        step.forward = self._capturer.capture(lambda: self._compute(step))
        for kind in kinds:
            self._sampler.capture(step, kind)

    def close(self) -> None:
        self._steps.clear()
        del self._sampler
        super().close()

    def _num_adapters(self, inputs: BatchInputs) -> int:
        """The most adapters that the rows of such steps may have. 0: no row has one."""
        if self._adapters is None or not inputs.adapter_ids.any():
            return 0
        if self._adapters.version != self._adapters_version:
            self._adapters_version = self._adapters.version
            self._steps = {
                size: step for size, step in self._steps.items() if not size.num_adapters
            }
        return self._adapters.most_in(inputs)

    def _step(self, inputs: BatchInputs, size: Size) -> BufferedStep:
        """Returns the shared data for steps of this size, made at the first such step. Also queues
        the copy of this step's arrays to the device.
        """
        step = self._steps.get(size)
        if step is None:
            step = self._steps[size] = self._buffers.step(size)
        lists, _ = self._lists.lists(inputs, step.room)
        self._buffers.send(step, inputs, lists, static=True)
        return step

    def _exact_step(self, inputs: BatchInputs) -> BufferedStep:
        lists, room = self._lists.lists(inputs)
        size = self._sizes.exact(inputs, self._num_adapters(inputs), shares=room.shared > 0)
        step = self._buffers.step(size, room)
        step.rows = self._rows(inputs)
        self._buffers.send(step, inputs, lists, static=False)
        if self._cache.in_fp8:
            dense = dense_tables(inputs, self._spec.block_size)
            step.views |= {name: to_device(each, self._device) for name, each in dense.items()}
        return step

    def _compute(self, step: BufferedStep) -> None:
        """Runs the forward pass: computes a step's logits from the step's arrays on the device."""
        views, size, model = step.views, step.size, self._model
        if self._adapters is not None and size.num_adapters:
            tiles = (views[name] for name in TILES_OF_ADAPTERS)
            yields = size.tokens > MAX_ROWS and size.num_adapters <= FEW_ADAPTERS
            model = self._adapters.begin(*tiles, yields=yields)
        finite = step.results[size.samples :].fill_(1)
        slots = tuple(views[name] for name in self._buffers.slots_names)
        cached = CachedStep(
            views["positions"],
            slots,
            self._angles,
            self._lists.plan_on(views, step.room),
            self._cache,
            self._states,
            self._decode_rows(views) if size.only_decodes else step.rows,
            model.rotations(views["positions"]) if model.config.latent else (),
        )
        token_ids = resolve_tokens(
            views["token_ids"], views["token_rows"], views["slots"], self._last_token
        )
        token_rows = views["token_rows"]
        if step.taps is not None:
            self._compute_tapped(step, token_ids, cached, slots, finite)
            return
        if size.tokens < 2 * size.samples or size.num_adapters:  # tiles are of all tokens
            x = model(token_ids, cached)  # (T, D)
            self._guard(x, token_rows, slots, finite)
            x = x if size.only_decodes else x.index_select(0, views["logit_rows"])
        else:  # most tokens need no logits, so the last MLP and the LM head run for few tokens only
            rows = views["logit_rows"]
            x, attended = model.forward_rows(token_ids, cached, rows)
            self._guard(attended, token_rows, slots, finite)
            self._guard(x, token_rows[rows], tuple(each[rows] for each in slots), finite)
        if size.samples:
            step.stream, step.logits = x, model.stream_logits(x)

    def _compute_tapped(
        self,
        step: BufferedStep,
        token_ids: Tensor,
        cached: CachedStep,
        slots: tuple[Tensor, ...],
        finite: Tensor,
    ) -> None:
        from engine.torch.models.tapped import (
            tapped_logits,
            tapped_norm,
            tapped_stream,
        )

        views, model, taps = step.views, self._model, step.taps
        assert taps is not None
        x = tapped_stream(model, token_ids, cached, taps.taps)
        self._guard(x, views["token_rows"], slots, finite)
        if not step.size.samples:
            tapped_norm(model, x, taps.taps)
            return
        rows = None if step.size.only_decodes else views["logit_rows"]
        step.stream, step.logits = tapped_logits(model, x, taps.taps, rows)

    def _decode_rows(self, views: dict[str, Tensor]) -> Rows | None:
        """The rows of a decode-only step, from its arrays on the device."""
        if not self._spec.has_state:
            return None
        each = views["token_rows"].long()
        return Rows(views["slots"].long(), views["positions"] == 0, each, each)

    def _guard(
        self, x: Tensor, token_rows: Tensor, slots: tuple[Tensor, ...], finite: Tensor
    ) -> None:
        for cache, own in zip(self._cache.caches, slots, strict=True):
            if len(cache.slots):  # if all layers have windows, the other cache has no layers
                guard(x, token_rows, own, cache.slots, finite)

    def _plain_handle(self, handle: CudaHandle, sampling: SamplingInputs) -> StepHandle:
        step, count = handle.step, handle.num_samples
        assert step.logits is not None and step.stream is not None
        start = step.size.samples
        hidden = self._model.norm(step.stream[:count]) if len(sampling.hidden_rows) else None
        return StepHandle(
            step.logits[:count].float(),
            hidden,
            step.results[start : start + handle.num_rows] != 0,
            handle.captured,
        )

    def _send_results(self, handle: CudaHandle) -> CudaPendingTokens:
        step = handle.step
        pinned = self._outbound.take(len(step.results))
        pinned.tensor[: len(step.results)].copy_(step.results, non_blocking=True)
        pinned.copied.record()
        return CudaPendingTokens(
            pinned,
            self._outbound,
            handle.num_samples,
            step.size.samples,
            handle.num_rows,
            handle.captured,
        )
