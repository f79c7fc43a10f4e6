"""The eager PyTorch model runner. It runs a model over the paged KV cache, without CUDA graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.architectures.base import ModelConfig
from engine.architectures.sites import Site, sites_of
from engine.runtime.model_runner import (
    F32,
    BatchInputs,
    Bytes,
    Group,
    RunnerConfig,
    RunnerSpec,
)
from engine.torch.execution.blocks import BlockCopier, PinnedRows
from engine.torch.execution.cache import (
    CacheGroups,
    StateCache,
    slots_by_cache,
)
from engine.torch.execution.sampling_runner import (
    SamplingRunner,
    StepHandle,
)
from engine.torch.kernels.attention import (
    AttentionBackend,
    AttentionPlan,
    attention_backend,
)
from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    ReferenceAttention,
)
from engine.torch.kernels.attention_sdpa import SdpaAttention
from engine.torch.kernels.attention_triton import TritonPlan
from engine.torch.kernels.fp8 import FP8
from engine.torch.kernels.rope import rope_write
from engine.torch.layers.attention import (
    AnyAttention,
    Attention,
    ImageRows,
)
from engine.torch.layers.recurrent import LayerState
from engine.torch.layers.rotary import Rotation
from engine.torch.layers.scans import Rows, divide
from engine.torch.models.base import Decoder

if TYPE_CHECKING:
    from engine.adapters.matrices import Adapter
    from engine.runtime.interp.taps import TapInputs
    from engine.torch.execution.adapter_stacks import (
        TorchAdapter,
        TorchAdapters,
    )


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A forward pass over the paged cache. Each layer writes its keys and values, then attends."""

    positions: Tensor  # (T,) int64
    rotations: tuple[Rotation | None, ...]  # one per layer
    slots: tuple[Tensor, ...]  # (T,) int64 for each cache
    plan: AttentionPlan
    cache: CacheGroups
    states: StateCache
    rows: Rows | None
    images: ImageRows | None

    def attend(self, attention: AnyAttention, qkv: Tensor) -> Tensor:
        layer = attention.layer
        q, k, v = attention.heads(qkv, self.rotations[layer])
        self.cache.write(layer, self.slots, k, v)
        cached = self.cache.layers[layer]
        return self.plan.attend(q, k, v, cached, window=attention.window, sinks=attention.sinks)

    def state(self, layer: int) -> LayerState:
        return self.states.layers[layer]


@dataclass(frozen=True, slots=True)
class CachedStep:
    """A forward pass over the cache. A layer first writes its keys and values, then attends."""

    positions: Tensor  # (T,) int32
    slots: tuple[Tensor, ...]  # (T,) int32 for each cache
    # For each layer (max_seq_len, dim): dim / 2 cosines, then sines. None: the layer has no RoPE
    angles: tuple[Tensor | None, ...]
    plan: TritonPlan
    cache: CacheGroups
    states: StateCache
    rows: Rows | None
    rotations: tuple[Rotation | None, ...]  # one per layer, or empty without latent attention
    images: None = None

    def attend(self, attention: AnyAttention, qkv: Tensor) -> Tensor:
        layer, window, sinks = attention.layer, attention.window, attention.sinks
        cached, angles = self.cache.layers[layer], self.angles[layer]
        if angles is None or not isinstance(attention, Attention):
            q, k, v = attention.heads(qkv, self.rotations[layer] if self.rotations else None)
            self.cache.write(layer, tuple(each.long() for each in self.slots), k, v)
            return self.plan.attend_cached(q.contiguous(), cached, window, sinks)
        q_norm, k_norm = attention.head_norms
        q = rope_write(
            qkv,
            self.positions,
            angles,
            self.cache.slots_of(layer, self.slots),
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
            window=model.config.window,
            verifies_drafts=True,
            has_exact_drafts=config.numerics == "invariant",
        )
        super().__init__(spec, device)
        self._model, self._dtype = model, dtype
        self._adapters: TorchAdapters | None = None  # made for the first adapter
        kv_dtype = FP8 if config.kv_dtype == "fp8" else dtype
        heads = replace(AttentionHeads.of(model.config), in_fp8=kv_dtype == FP8)
        self._attention = attention_backend(
            config.attention,
            heads,
            block_size=config.block_size,
            dtype=dtype,
            device=device,
            invariant=config.numerics == "invariant",
        )
        self._two_way: AttentionBackend = self._attention
        if not isinstance(self._attention, ReferenceAttention):
            self._two_way = SdpaAttention(heads, block_size=config.block_size, dtype=dtype)
        self._cache = CacheGroups(model.config, config, device, kv_dtype)
        count = config.max_slots + 1 + config.num_checkpoints
        self._states = StateCache(model.config, count, device, dtype)
        self._numerics = (
            f"{dtype} {kv_dtype} {config.quantization} {config.numerics}"
            f" {type(self._attention).__name__}"
        )
        self._block_size = config.block_size
        self._blocks: BlockCopier | None = None  # made when a tier first needs it

    @torch.inference_mode()
    def forward(self, inputs: BatchInputs) -> StepHandle:
        positions = self._put(inputs.positions.astype(np.int64))
        step = PagedStep(
            positions,
            self._model.rotations(self._rope_positions(inputs, positions)),
            tuple(self._put(slots) for slots in slots_by_cache(inputs)),
            self._attention_of(inputs).plan(inputs, positions),
            self._cache,
            self._states,
            self._rows(inputs),
            self._images(inputs),
        )
        self._states.load(inputs)
        model = self._model_for(inputs)
        if inputs.taps is not None:
            return self._tapped(model, inputs, inputs.taps, step)
        x = model(self._token_ids(inputs), step)  # (T, D)
        self._states.save(inputs)
        finite = self._cache.guard(inputs, x, step.slots)
        if not len(inputs.logit_rows):
            return StepHandle(None, None, finite)
        rows = self._put(inputs.logit_rows.astype(np.int64))
        hidden = model.norm(x.index_select(0, rows))
        return StepHandle(model.head_logits(hidden), hidden, finite)

    def _model_for(self, inputs: BatchInputs) -> Decoder:
        """The model that computes a step: with adapters, if a row has one."""
        if self._adapters is None or not inputs.adapter_ids.any():
            return self._model
        from engine.torch.execution.adapter_stacks import step_tiles

        sizes = len(inputs.token_ids), len(inputs.logit_rows), self._adapters.num_adapters
        return self._adapters.begin(*map(self._put, step_tiles(inputs, *sizes)))

    def pack_adapter(self, adapter: "Adapter") -> "TorchAdapter":
        return self._with_adapters().pack(adapter)

    def set_adapter(self, number: int, packed: "TorchAdapter") -> None:
        self._with_adapters().set(number, packed)

    def _with_adapters(self) -> "TorchAdapters":
        if self._adapters is None:
            from engine.torch.execution.adapter_stacks import TorchAdapters

            self._adapters = TorchAdapters(self._model, self._device, self._dtype)
        return self._adapters

    def _tapped(
        self, model: Decoder, inputs: BatchInputs, taps: "TapInputs", step: PagedStep
    ) -> StepHandle:
        """As the rest of `forward`, for a step with taps."""
        # Imported here, because few servers are asked for activations.
        from engine.torch.execution.taps import StepTapping
        from engine.torch.models.tapped import tapped_norm, tapped_stream

        tapping = StepTapping(taps)
        own = tapping.put(None, self.sites, self._device)
        x = tapped_stream(model, self._token_ids(inputs), step, own.taps)  # (T, D)
        self._states.save(inputs)
        finite = self._cache.guard(inputs, x, step.slots)
        rows = self._put(inputs.logit_rows.astype(np.int64))
        hidden = tapped_norm(model, x, own.taps).index_select(0, rows)
        captured = tapping.captured(own)
        if not len(rows):
            return StepHandle(None, None, finite, captured)
        return StepHandle(model.head_logits(hidden), hidden, finite, captured)

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        return sites_of(self._model.config)

    @torch.inference_mode()
    def unembed(self, x: F32) -> F32:
        stream = self._put(np.ascontiguousarray(x)).to(self._model.norm.weight.dtype)
        rows = np.arange(len(x), dtype=np.int32)
        return self.logits(StepHandle(self._model.logits(stream), None, stream), rows)

    @torch.inference_mode()
    def head_row(self, token_id: int) -> F32:
        weight = self._model.head.weight[token_id].float() * self._model.norm.weight.float()
        row = (weight / self._model.config.logits_scaling)[None]
        return self.logits(StepHandle(row, None, row), np.zeros(1, np.int32))[0]

    def input_attribution(
        self, token_ids: Sequence[int], target: int | None, position: int
    ) -> tuple[int, F32]:
        from engine.torch.models.tapped import input_x_gradient

        ids = self._put(np.array(token_ids, np.int64))
        with torch.inference_mode(False), torch.enable_grad():
            chosen, shares = input_x_gradient(self._model, ids, self.sites, target, position)
        rows = np.zeros(1, np.int32)
        return chosen, self.logits(StepHandle(shares[None], None, shares), rows)[0]

    @property
    def kv_identity(self) -> str:
        name = "cpu"
        if self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
        return f"torch {torch.__version__} {name} {self._numerics}"

    def bytes_per_block(self, group: Group) -> int:
        return self._copier().bytes_per_block(group)

    def read_blocks(self, group: Group, blocks: Sequence[int]) -> Callable[[], Bytes]:
        return self._copier().read(group, blocks)

    def write_blocks(self, group: Group, blocks: Sequence[int], rows: Bytes | list[Bytes]) -> None:
        self._copier().write(group, blocks, rows)

    def row_maker(self) -> Callable[[int], Bytes] | None:
        return PinnedRows() if self._device.type == "cuda" else None

    def _copier(self) -> BlockCopier:
        if self._blocks is None:
            size = self._block_size
            self._blocks = BlockCopier(self._cache, self._states, size, self._device)
        return self._blocks

    def _rows(self, inputs: BatchInputs) -> Rows | None:
        """The rows of a step, if layers keep states."""
        if not self._spec.has_state:
            return None
        return divide(inputs.query_start, inputs.positions, inputs.slots, self._device)

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
        del self._model, self._cache, self._states, self._blocks, self._adapters
        super().close()
