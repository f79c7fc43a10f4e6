"""`PackedRunner`: computes tokens of all sequences in one forward pass of a Transformers model.

It uses the paged KV cache of our own runners. So prefix sharing, preemption and chunked prefill
work as with them. The model only gets tokens with their positions, and calls our attention.
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.execution.cache import KVShape, PagedCache
from engine.backends.custom.frameworks.torch.execution.sampling_runner import (
    SamplingRunner,
    StepHandle,
)
from engine.backends.custom.frameworks.torch.kernels.attention import (
    AttentionBackend,
    AttentionPlan,
)
from engine.backends.custom.frameworks.torch.kernels.attention_heads import AttentionHeads
from engine.backends.custom.frameworks.torch.kernels.attention_sdpa import SdpaAttention
from engine.backends.custom.frameworks.torch.kernels.attention_triton import TritonAttention
from engine.backends.custom.runtime.model_runner import (
    GPU_STEP_S,
    BatchInputs,
    RunnerConfig,
    RunnerSpec,
)
from engine.backends.transformers.attention import PackedStep, Scoring
from engine.backends.transformers.states import FinalStates


class Attentions:
    """Attention backends for each scoring and number of heads. They are kept for all steps."""

    def __init__(
        self, shape: KVShape, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = shape
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._made: dict[tuple[Scoring, int], AttentionBackend] = {}
        if device.type == "cuda":
            # cuDNN makes a plan for each new shape, which takes longer than many steps. Here, every
            # step has another shape.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def get(self, scoring: Scoring, num_heads: int) -> AttentionBackend:
        key = (scoring, num_heads)
        if key not in self._made:
            self._made[key] = self._make(scoring, num_heads)
        return self._made[key]

    def _make(self, scoring: Scoring, num_heads: int) -> AttentionBackend:
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

        def plan(scoring: Scoring, num_heads: int) -> AttentionPlan:
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
