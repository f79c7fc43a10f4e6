"""`ModelShard`: the cut of a model that one rank loads and runs.

A shard is a decoder like any other: its config has the rank's heads, layers and intermediate size,
and its weights are cuts of the stored weights, which are read lazily. After loading, a few layers
are wrapped to communicate. Everything else does not know of ranks.

A layer whose input is cut (o, down) has a partial sum as its result; the ranks add their results.
A layer whose output is cut (q, k, v, gate, up) needs no communication, so it stays as it is.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.architectures.base import ModelConfig
from engine.core.errors import ConfigError
from engine.core.shards.layout import ShardLayout, kv_heads_of, share
from engine.runners.parameters import ROPE_FACTORS
from engine.torch.execution.distributed.collectives import Ranks
from engine.torch.execution.distributed.cut import (
    cut,
    cut_experts,
    zeros,
)
from engine.torch.layers.experts import Experts
from engine.torch.layers.norm import RMSNorm
from engine.torch.models.base import Decoder
from engine.torch.models.quantized_loading import (
    EMBED,
    keeps_quantized,
)
from engine.weights.model import ModelSource
from engine.weights.quants import traits_of
from engine.weights.weight import Weight

HEAD = "head.weight"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# Weights whose rows are those of query heads, of KV heads, and of the intermediate size.
_BY_HEAD = ("attn.q", "attn.q_b", "attn.gate", "attn.sinks")
_BY_KV_HEAD = ("attn.k", "attn.v")
_PER_HEAD = ("attn.k_up", "attn.v_up")  # a matrix for each head
_WIDENING = ("mlp.gate", "mlp.up", "experts.gate", "experts.up", "shared.gate", "shared.up")
# Weights whose columns are cut, so that their results are partial sums.
_SUMMED = ("attn.o", "mlp.down", "experts.down", "shared.down")


def check_shards(config: ModelConfig, layout: ShardLayout) -> None:
    """Raises `ConfigError` if a model can't be cut for these ranks."""
    family, parts = config.family, layout.tensor
    for name, found in (
        ("an image encoder", config.vision),
        ("layers with a state", config.state),
        ("a text encoder", config.encoder),
    ):
        if found is not None:
            raise ConfigError(f"'{family}' has {name}, which runs on one rank only; {_advice()}")
    if layout.pipeline > config.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size {layout.pipeline} is more than the model's "
            f"{config.num_layers} layers; lower it"
        )
    if parts == 1:
        return
    if config.qk_norm == "whole" or config.alibi_bias is not None:
        what = "norms over all heads" if config.qk_norm == "whole" else "ALiBi"
        raise ConfigError(
            f"'{family}' has {what}, so its heads can't be divided; "
            "use pipeline_parallel_size instead of tensor_parallel_size"
        )
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if not _divides(config, parts):
        fitting = [str(n) for n in range(1, heads + 1) if _divides(config, n)]
        shown = f"{', '.join(fitting[:-1])} or {fitting[-1]}" if len(fitting) > 1 else fitting[0]
        raise ConfigError(
            f"tensor_parallel_size {parts} does not divide the model's {heads} heads and "
            f"{kv_heads} KV heads; use {shown}, or pipeline_parallel_size"
        )


def _divides(config: ModelConfig, parts: int) -> bool:
    kv_heads = config.num_kv_heads
    fits = kv_heads % parts == 0 or parts % kv_heads == 0
    return config.num_heads % parts == 0 and fits


def _advice() -> str:
    return "leave out tensor_parallel_size and pipeline_parallel_size"


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The cut of rank `rank`. `whole` is the config of the whole model. Intermediate sizes are cut
    into multiples of `unit`, so that the blocks of quantized weights stay whole.
    """

    whole: ModelConfig
    layout: ShardLayout
    rank: int
    unit: int = 1

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        layout: ShardLayout,
        rank: int,
        device: torch.device,
    ) -> "ModelShard":
        unit = 1
        if keeps_quantized(weights, device):
            summed = (each for name, each in weights.items() if _module(name) in _SUMMED[1:])
            unit = max((traits_of(each.kernel_dtype).block_elems for each in summed), default=1)
        return cls(config, layout, rank, unit)

    @property
    def is_first(self) -> bool:
        return self.layout.stage(self.rank) == 0

    @property
    def is_last(self) -> bool:
        return self.layout.stage(self.rank) == self.layout.pipeline - 1

    @property
    def layers(self) -> range:
        return share(self.whole.num_layers, self.layout.pipeline, self.layout.stage(self.rank))

    @property
    def vocabulary(self) -> range:
        size, parts = self.whole.vocab_size, self.layout.tensor
        return share(size, parts, self._part, unit=-(-size // parts))

    @property
    def config(self) -> ModelConfig:
        """The shard's own config, with the sizes of the tensors that this rank has."""
        whole, layers = self.whole, self.layers
        experts = whole.experts
        if experts is not None:
            shared = len(self._inner(experts.shared_size)) if experts.shared_size else 0
            experts = replace(experts, size=len(self._inner(experts.size)), shared_size=shared)
        return replace(
            whole,
            num_layers=len(layers),
            layers=whole.layers[layers.start : layers.stop],
            num_heads=len(self._heads),
            num_kv_heads=len(self._kv_heads),
            intermediate_size=len(self._inner(whole.intermediate_size)),
            experts=experts,
            vocab_size=len(self.vocabulary),
            tie_embeddings=whole.tie_embeddings and self.is_first and self.is_last,
            embedding_multiplier=whole.embedding_multiplier if self.is_first else 1.0,
        )

    def weights(self, stored: Mapping[str, Weight]) -> dict[str, Weight]:
        """The weights of this rank, under the names that the shard's decoder has for them."""
        return dict(self._weights(stored))

    def prepare(self, model: Decoder, dtype: torch.dtype, ranks: Ranks) -> None:
        """Removes what other stages have from a decoder whose weights are not loaded yet."""
        if not self.is_first:
            received = ReceivedStream(self.whole.hidden_size, dtype, ranks)
            model.set_submodule("embed", received)
        if not self.is_last:
            del model.head

    def connect(self, model: Decoder, ranks: Ranks) -> None:
        """Lets a loaded decoder communicate with the other ranks."""
        model.config = replace(self.config, vocab_size=self.whole.vocab_size)
        if not self.is_last:
            model.register_forward_hook(lambda _model, _args, x: ranks.send_on(x))
        if self.layout.tensor == 1:
            return
        for path in [path for path, module in model.named_modules() if _is_summed(path, module)]:
            model.set_submodule(path, SummedLinear(model.get_submodule(path), ranks))
        own, size = self.vocabulary, self.whole.vocab_size
        if self.is_first:
            table = VocabEmbedding(model.embed, own.start, len(own), ranks)
            model.set_submodule("embed", table)
        if self.is_last:
            width = -(-size // self.layout.tensor)
            model.set_submodule("head", VocabHead(model.head, width, size, ranks))

    @property
    def _part(self) -> int:
        return self.layout.part(self.rank)

    @property
    def _heads(self) -> range:
        return share(self.whole.num_heads, self.layout.tensor, self._part)

    @property
    def _kv_heads(self) -> range:
        return kv_heads_of(self.whole.num_kv_heads, self.layout.tensor, self._part)

    def _inner(self, size: int) -> range:
        """This rank's part of an intermediate size."""
        own = share(size, self.layout.tensor, self._part, self.unit)
        if not len(own):
            raise ConfigError(
                f"an MLP of {size} values in blocks of {self.unit} has no part for each of "
                f"{self.layout.tensor} ranks; lower tensor_parallel_size"
            )
        return own

    def _weights(self, stored: Mapping[str, Weight]) -> Iterator[tuple[str, Weight]]:
        layers = self.layers
        for name, weight in stored.items():
            match = _LAYER.fullmatch(name)
            if match is None:
                yield from self._outer(name, weight)
            elif int(match[1]) in layers:
                yield f"layers.{int(match[1]) - layers.start}.{match[2]}", self._cut(name, weight)

    def _outer(self, name: str, weight: Weight) -> Iterator[tuple[str, Weight]]:
        """The weights outside of layers, of which the stages have different ones."""
        if name == EMBED:
            rows = cut(weight, self.vocabulary)
            if self.is_first:
                yield name, rows
            if self.is_last and self.whole.tie_embeddings and not self.is_first:
                yield HEAD, rows
        elif name == HEAD:
            if self.is_last:
                yield name, cut(weight, self.vocabulary)
        elif name == ROPE_FACTORS or name.startswith("norm.") or self.is_first:
            yield name, weight

    def _cut(self, name: str, weight: Weight) -> Weight:
        """This rank's part of a weight in a layer."""
        if self.layout.tensor == 1:
            return weight
        module, is_bias = _module(name), name.endswith(".bias")
        if module in _SUMMED and is_bias:
            return weight if self._part == 0 else zeros(weight)
        if module in _PER_HEAD:
            return cut_experts(weight, self._heads)
        if module in _BY_HEAD:
            return cut(weight, _rows_of(self._heads, weight, self.whole.num_heads))
        if module in _BY_KV_HEAD:
            return cut(weight, _rows_of(self._kv_heads, weight, self.whole.num_kv_heads))
        if module in _WIDENING:
            return cut(weight, self._inner(weight.spec.shape[1 if weight.spec.of_experts else 0]))
        if module == "attn.o":
            size = weight.spec.shape[1] // self.whole.num_heads
            return cut(weight, columns=_scaled(self._heads, size))
        if module in _SUMMED:
            return cut(weight, columns=self._inner(weight.spec.shape[-1]))
        return weight


def largest_shards(
    source: ModelSource, layout: ShardLayout, device: torch.device
) -> list[ModelShard]:
    """The largest shard of each stage, which is that of its first rank."""
    check_shards(source.config, layout)
    return [
        ModelShard.of(source.config, source.weights, layout, layout.ranks_of(stage)[0], device)
        for stage in range(layout.pipeline)
    ]


def _module(name: str) -> str:
    """The layer's module that a weight belongs to: "layers.3.attn.q.weight" -> "attn.q". A weight
    without a kind is a module itself, such as "layers.3.attn.sinks".
    """
    match = _LAYER.fullmatch(name)
    path = name if match is None else match[2]
    head, _, kind = path.rpartition(".")
    return head if kind in ("weight", "bias") else path


def _is_summed(path: str, module: nn.Module) -> bool:
    """Whether the results of a layer are partial sums. Experts are summed as a whole."""
    is_in_experts = ".experts." in path
    return isinstance(module, Experts) or (path.endswith((".o", ".down")) and not is_in_experts)


def _rows_of(heads: range, weight: Weight, count: int) -> range:
    return _scaled(heads, weight.spec.shape[0] // count)


def _scaled(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)


class SummedLinear(nn.Module):
    """A linear layer, or a mixture of experts, whose results the ranks add. Only the first rank has
    the bias.
    """

    def __init__(self, inner: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.inner, self._ranks = inner, ranks
        self.is_invariant = bool(getattr(inner, "is_invariant", False))

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.sum(self.inner(x))

    def fused(self, x: Tensor, *, residual: Tensor) -> Tensor:
        """residual + the layer's result"""
        return residual + self(x)


class VocabEmbedding(nn.Module):
    """The rows `[start, start + size)` of the token table. Other ranks have the other rows."""

    def __init__(self, inner: nn.Module, start: int, size: int, ranks: Ranks) -> None:
        super().__init__()
        self.inner, self._ranks = inner, ranks
        self._start, self._size = start, size

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self._start
        is_here = (local >= 0) & (local < self._size)
        x: Tensor = self.inner(torch.where(is_here, local, 0))
        return self._ranks.sum(torch.where(is_here[:, None], x, 0))


class VocabHead(nn.Module):
    """The LM head for some of the vocabulary. The ranks join their logits. `width` is the largest
    number of logits that a rank has; ranks with fewer pad them.
    """

    def __init__(self, inner: nn.Module, width: int, vocab_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.inner, self._ranks = inner, ranks
        self._width, self._vocab_size = width, vocab_size
        self.is_invariant = bool(getattr(inner, "is_invariant", False))

    def forward(self, x: Tensor) -> Tensor:
        return self._whole(self.inner(x))

    def fused(self, x: Tensor, *, norm: RMSNorm) -> Tensor:
        """The logits of norm(x)."""
        fused: Tensor = self.inner.fused(x, norm=norm)  # type: ignore[operator]
        return self._whole(fused)

    def _whole(self, logits: Tensor) -> Tensor:
        """(R, own logits) -> (R, V). Padding is at the end, because only last ranks have fewer."""
        missing = self._width - logits.shape[-1]
        if missing:
            logits = nn.functional.pad(logits, (0, missing))
        return self._ranks.joined(logits)[:, : self._vocab_size]


class ReceivedStream(nn.Module):
    """Takes the place of the token table in later stages: the residual stream of the stage before,
    (T, D).
    """

    def __init__(self, size: int, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__()
        self._size, self._dtype, self._ranks = size, dtype, ranks

    def forward(self, ids: Tensor) -> Tensor:
        return self._ranks.receive((len(ids), self._size), self._dtype)
