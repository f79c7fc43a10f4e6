"""The eager PyTorch model runner. It runs a model over the paged KV cache, without CUDA graphs."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.execution.cache import CacheGroups, slots_by_cache
from engine.backends.custom.frameworks.torch.execution.sampling_runner import (
    SamplingRunner,
    StepHandle,
)
from engine.backends.custom.frameworks.torch.kernels.attention import (
    AttentionBackend,
    AttentionPlan,
    attention_backend,
)
from engine.backends.custom.frameworks.torch.kernels.attention_heads import AttentionHeads
from engine.backends.custom.frameworks.torch.kernels.attention_reference import ReferenceAttention
from engine.backends.custom.frameworks.torch.kernels.attention_sdpa import SdpaAttention
from engine.backends.custom.frameworks.torch.layers.attention import AnyAttention, ImageRows
from engine.backends.custom.frameworks.torch.layers.rotary import Rotation
from engine.backends.custom.frameworks.torch.models.base import Decoder
from engine.backends.custom.runtime.model_runner import BatchInputs, RunnerConfig, RunnerSpec


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A forward pass over the paged cache. Each layer writes its keys and values, then attends."""

    positions: Tensor  # (T,) int64
    rotations: tuple[Rotation | None, ...]  # one per layer
    slots: tuple[Tensor, ...]  # (T,) int64 for each cache
    plan: AttentionPlan
    cache: CacheGroups
    images: ImageRows | None

    def attend(self, attention: AnyAttention, qkv: Tensor) -> Tensor:
        layer = attention.layer
        q, k, v = attention.heads(qkv, self.rotations[layer])
        self.cache.write(layer, self.slots, k, v)
        cached = self.cache.layers[layer]
        return self.plan.attend(q, k, v, cached, window=attention.window, sinks=attention.sinks)


class TorchRunner(SamplingRunner):
    def __init__(
        self, model: Decoder, config: RunnerConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        spec = RunnerSpec.of(
            config,
            model.config.vocab_size,
            depth=0 if device.type == "cpu" else 1,
            window=model.config.window,
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
        self._two_way: AttentionBackend = self._attention
        if not isinstance(self._attention, ReferenceAttention):
            self._two_way = SdpaAttention(
                AttentionHeads.of(model.config), block_size=config.block_size, dtype=dtype
            )
        self._cache = CacheGroups(model.config, config, device, dtype)

    @torch.inference_mode()
    def forward(self, inputs: BatchInputs) -> StepHandle:
        positions = self._put(inputs.positions.astype(np.int64))
        step = PagedStep(
            positions,
            self._model.rotations(self._rope_positions(inputs, positions)),
            tuple(self._put(slots) for slots in slots_by_cache(inputs)),
            self._attention_of(inputs).plan(inputs, positions),
            self._cache,
            self._images(inputs),
        )
        x = self._model(self._token_ids(inputs), step)  # (T, D)
        finite = self._cache.guard(inputs, x, step.slots)
        if not len(inputs.logit_rows):
            return StepHandle(None, None, finite)
        rows = self._put(inputs.logit_rows.astype(np.int64))
        hidden = self._model.norm(x.index_select(0, rows))
        return StepHandle(self._model.head_logits(hidden), hidden, finite)

    def _images(self, inputs: BatchInputs) -> ImageRows | None:
        if inputs.embeds is None or inputs.embed_rows is None:
            return None
        rows = self._put(inputs.embed_rows.astype(np.int64))
        return ImageRows(rows, self._put(inputs.embeds))

    def _rope_positions(self, inputs: BatchInputs, positions: Tensor) -> Tensor:
        rope = inputs.rope_positions
        return positions if rope is None else self._put(rope.astype(np.int64))

    def _attention_of(self, inputs: BatchInputs) -> AttentionBackend:
        """The attention backend for a step. Only some backends can attend to later positions."""
        return self._attention if inputs.visible_end is None else self._two_way

    def close(self) -> None:
        """Frees the model and the KV cache. The runner cannot be used afterwards."""
        del self._model, self._cache
        super().close()
