"""The eager PyTorch model runner. It runs a model over the paged KV cache, without CUDA graphs."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.execution.cache import (
    KVShape,
    PagedCache,
    StateCache,
)
from engine.backends.custom.frameworks.torch.execution.sampling_runner import (
    SamplingRunner,
    StepHandle,
)
from engine.backends.custom.frameworks.torch.kernels.attention import (
    AttentionPlan,
    attention_backend,
)
from engine.backends.custom.frameworks.torch.kernels.attention_heads import AttentionHeads
from engine.backends.custom.frameworks.torch.kernels.attention_triton import TritonPlan
from engine.backends.custom.frameworks.torch.kernels.rope import rope_write
from engine.backends.custom.frameworks.torch.layers.attention import Attention
from engine.backends.custom.frameworks.torch.layers.recurrent import LayerState
from engine.backends.custom.frameworks.torch.layers.rotary import Rotation
from engine.backends.custom.frameworks.torch.layers.scans import Rows, divide
from engine.backends.custom.frameworks.torch.models.base import Decoder
from engine.backends.custom.runtime.model_runner import BatchInputs, RunnerConfig, RunnerSpec


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A forward pass over the paged cache. Each layer writes its keys and values, then attends."""

    positions: Tensor  # (T,) int64
    rotations: tuple[Rotation | None, ...]  # one per layer
    write_slots: Tensor  # (T,) int64
    plan: AttentionPlan
    cache: PagedCache
    states: StateCache
    rows: Rows | None

    def attend(self, attention: Attention, qkv: Tensor) -> Tensor:
        layer = attention.layer
        q, k, v = attention.heads(qkv, self.rotations[layer])
        self.cache.write(attention.cache_layer, self.write_slots, k, v)
        cached = self.cache.layers[attention.cache_layer]
        return self.plan.attend(q, k, v, cached, window=attention.window, sinks=attention.sinks)

    def state(self, layer: int) -> LayerState:
        return self.states.layers[layer]


@dataclass(frozen=True, slots=True)
class CachedStep:
    """A forward pass over the cache. A layer first writes its keys and values, then attends."""

    positions: Tensor  # (T,) int32
    write_slots: Tensor  # (T,) int32
    # For each layer (max_seq_len, dim): dim / 2 cosines, then sines. None: the layer has no RoPE
    angles: tuple[Tensor | None, ...]
    plan: TritonPlan
    cache: PagedCache
    states: StateCache
    rows: Rows | None

    def attend(self, attention: Attention, qkv: Tensor) -> Tensor:
        layer, window, sinks = attention.cache_layer, attention.window, attention.sinks
        cached, angles = self.cache.layers[layer], self.angles[attention.layer]
        if angles is None:
            q, k, v = attention.heads(qkv, None)
            self.cache.write(layer, self.write_slots.long(), k, v)
            return self.plan.attend_cached(q.contiguous(), cached, window, sinks)
        q_norm, k_norm = attention.head_norms
        q = rope_write(
            qkv,
            self.positions,
            angles,
            self.write_slots,
            cached,
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
        )
        return self.plan.attend_cached(q, cached, window, sinks)

    def state(self, layer: int) -> LayerState:
        return self.states.layers[layer]


class TorchRunner(SamplingRunner):
    def __init__(
        self, model: Decoder, config: RunnerConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        spec = RunnerSpec.of(
            config,
            model.config.vocab_size,
            depth=0 if device.type == "cpu" else 1,
            has_state=model.config.state is not None,
        )
        super().__init__(spec, device)
        self._model = model
        self._attention = attention_backend(
            config.attention,
            AttentionHeads.of(model.config),
            block_size=config.block_size,
            dtype=dtype,
            device=device,
        )
        layers = len(model.config.attention_layers)
        shape = KVShape(layers, model.config.num_kv_heads, model.config.head_dim)
        self._cache = PagedCache(shape, config.num_blocks, config.block_size, device, dtype)
        count = config.max_slots + 1 + config.num_checkpoints
        self._states = StateCache(model.config, count, device, dtype)

    @torch.inference_mode()
    def forward(self, inputs: BatchInputs) -> StepHandle:
        positions = self._put(inputs.positions.astype(np.int64))
        step = PagedStep(
            positions,
            self._model.rotations(positions),
            self._put(inputs.write_slots),
            self._attention.plan(inputs, positions),
            self._cache,
            self._states,
            self._rows(inputs),
        )
        self._states.load(inputs)
        x = self._model(self._token_ids(inputs), step)  # (T, D)
        self._states.save(inputs)
        finite = self._cache.guard(inputs, x, step.write_slots)
        if not len(inputs.logit_rows):
            return StepHandle(None, None, finite)
        rows = self._put(inputs.logit_rows.astype(np.int64))
        hidden = self._model.norm(x.index_select(0, rows))
        return StepHandle(self._model.head_logits(hidden), hidden, finite)

    def _rows(self, inputs: BatchInputs) -> Rows | None:
        """The rows of a step, if layers keep states."""
        if not self._spec.has_state:
            return None
        return divide(inputs.query_start, inputs.positions, inputs.slots, self._device)

    def close(self) -> None:
        """Frees the model and the KV cache. The runner cannot be used afterwards."""
        del self._model, self._cache, self._states
        super().close()
