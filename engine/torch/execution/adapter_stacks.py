"""The LoRA adapters of a PyTorch model: packs them, and keeps those with a slot on the device.

The matrices of all slots are stacked, so that one kernel computes any mix of adapters. Stacks grow
when an adapter has a larger rank, changes a layer that no other did, or gets a slot beyond the
stack's end.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.adapters.matrices import EMBED, Adapter
from engine.runtime.model_runner import I32, BatchInputs
from engine.torch.kernels.lora import LoraStack, lora_linear, tiles_of
from engine.torch.layers.adapted import AdapterTiles, adapted, empty_tiles
from engine.torch.layers.linear import Linear
from engine.torch.models.base import Decoder

_RANK_STEP, _PLACE_STEP = 16, 8
FEW_ADAPTERS = 2  # steps with at most so many have graphs of their own


@dataclass(frozen=True, slots=True)
class _Matrices:
    """An adapter's matrices of one layer in host memory, with the same rank for all its parts."""

    a: Tensor  # (parts, R, D)
    b: Tensor  # (F, R)


@dataclass(frozen=True, slots=True)
class TorchAdapter:
    """A packed adapter: the matrices of each layer that it changes, by the layer's path."""

    layers: dict[str, _Matrices]
    whole: dict[str, Tensor]  # matrices in place of the layer's own
    rank: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Layer:
    parts: tuple[str, ...]  # the weights that it has, by the engine's names
    rows: tuple[int, ...]  # output channels of each
    columns: int


class TorchAdapters:
    def __init__(self, model: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        self._base, self._device, self._dtype = model, device, dtype
        self._layers = dict(_layers(model))
        self._stacks: dict[str, LoraStack] = {}
        self._whole: dict[str, dict[int, Tensor]] = {}  # by the path of a layer and by place
        self._rank = 0
        self._compiled: set[int] = set()  # ranks for which kernels are compiled
        self.num_adapters = 0  # that a step can have
        self.tiles = AdapterTiles(empty_tiles(device), empty_tiles(device))
        self.model = model  # the tree of modules with adapters
        # Changes if tensors were replaced, which captured graphs have addresses of.
        self.version = 0

    def pack(self, adapter: Adapter) -> TorchAdapter:
        """Copies the matrices into page-locked memory, from where the device reads them later."""
        rank = -(-adapter.max_rank // _RANK_STEP) * _RANK_STEP
        layers = {}
        for path, layer in self._layers.items():
            pairs = [adapter.pairs.get(part) for part in layer.parts]
            if all(pair is None for pair in pairs):
                continue
            a = self._on_host(len(pairs), rank, layer.columns)
            b = self._on_host(sum(layer.rows), rank)
            for pair, own_a, own_b in zip(pairs, a, b.split(layer.rows), strict=True):
                if pair is not None:
                    own_a[: pair.rank].copy_(torch.from_numpy(pair.a))
                    own_b[:, : pair.rank].copy_(torch.from_numpy(pair.b))
            layers[path] = _Matrices(a, b)
        whole = {}
        for name, matrix in adapter.whole.items():
            path = name.removesuffix(".weight")
            whole[path] = self._on_host(*matrix.shape).copy_(torch.from_numpy(matrix))
        num_bytes = sum(each.a.nbytes + each.b.nbytes for each in layers.values())
        num_bytes += sum(each.nbytes for each in whole.values())
        if self._device.type == "cuda" and layers:
            self._compile(rank)
        return TorchAdapter(layers, whole, rank, num_bytes)

    @torch.inference_mode()
    def set(self, number: int, packed: TorchAdapter) -> None:
        """Queues the copies of the matrices to the device."""
        if (
            packed.rank > self._rank
            or number > self.num_adapters
            or packed.layers.keys() - self._stacks.keys()
        ):
            self._grow(number, packed)
        self._write(number, packed)
        if packed.whole or any(number in each for each in self._whole.values()):
            self._replace(number, packed.whole)

    def _grow(self, number: int, packed: TorchAdapter) -> None:
        old = self._rank
        self._rank = max(self._rank, packed.rank)
        self.num_adapters = max(self.num_adapters, -(-number // _PLACE_STEP) * _PLACE_STEP)
        for path in dict.fromkeys([*self._stacks, *packed.layers]):
            layer, places = self._layers[path], self.num_adapters + 1
            a = self._on_device(places, len(layer.parts), self._rank, layer.columns)
            b = self._on_device(places, sum(layer.rows), self._rank)
            if (stack := self._stacks.get(path)) is not None:
                a[: len(stack.a), :, :old] = stack.a.unflatten(1, (-1, old))
                b[: len(stack.b), :, :old] = stack.b
            self._stacks[path] = LoraStack(a.flatten(1, 2), b, layer.rows)
        self._renew()

    def _renew(self) -> None:
        twin = adapted(self._base, self._stacks, self._whole, self.tiles)
        assert isinstance(twin, Decoder)
        self.model = twin
        self.version += 1

    def _replace(self, number: int, whole: Mapping[str, Tensor]) -> None:
        """Whole matrices are rare and large, so only adapters that have some take room for them."""
        for path in {*self._whole, *whole}:
            held = self._whole.pop(path, {})
            places = {place: each for place, each in held.items() if place != number}
            if path in whole:
                places[number] = whole[path].to(self._device, non_blocking=True)
            if places:
                self._whole[path] = places
        self._renew()

    def _write(self, number: int, packed: TorchAdapter) -> None:
        for path, stack in self._stacks.items():
            a, b = stack.a[number].unflatten(0, (-1, self._rank)), stack.b[number]
            matrices = packed.layers.get(path)
            if matrices is None:
                b.zero_()
                continue
            a[:, : packed.rank].copy_(matrices.a, non_blocking=True)
            b[:, : packed.rank].copy_(matrices.b, non_blocking=True)
            b[:, packed.rank :].zero_()  # what A x has there counts for nothing

    def most_in(self, inputs: BatchInputs) -> int:
        """The most adapters of steps like this one: few, or as many as there are places for."""
        count = len(np.unique(inputs.adapter_ids[inputs.adapter_ids > 0]))
        return FEW_ADAPTERS if count <= FEW_ADAPTERS else self.num_adapters

    def begin(self, tokens: Tensor, logits: Tensor, *, yields: bool = False) -> Decoder:
        """The model for a step with these tiles. `yields`: see `lora_linear`."""
        self.tiles.tokens, self.tiles.logits, self.tiles.yields = tokens, logits, yields
        return self.model

    @torch.inference_mode()
    def _compile(self, rank: int) -> None:
        """Compiles the kernels for a rank here, so that no step waits for them."""
        if rank in self._compiled:
            return
        self._compiled.add(rank)
        act = self._base.config.activation
        shapes = {
            (layer.rows, layer.columns, act if path.endswith(".gate_up") else None)
            for path, layer in self._layers.items()
            if path != "embed"
        }
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            tiles = torch.ones((1, 3), dtype=torch.int32, device=self._device)  # row 1, place 1
            for rows, columns, gate in shapes:
                a = self._on_device(2, len(rows) * rank, columns)
                b = self._on_device(2, sum(rows), rank)
                read = partial(self._on_device, 2, columns)
                product = partial(self._on_device, 2, sum(rows))
                lora_linear(tiles, LoraStack(a, b, rows), read, product, gate, False)
        stream.synchronize()

    def _on_host(self, *shape: int) -> Tensor:
        pinned = self._device.type == "cuda"
        return torch.zeros(shape, dtype=self._dtype, pin_memory=pinned)

    def _on_device(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


def step_tiles(
    inputs: BatchInputs, num_tokens: int, num_logits: int, num_adapters: int
) -> tuple[I32, I32]:
    """The tiles of a step's tokens and of its rows of logits, padded to these numbers."""
    places = np.repeat(inputs.adapter_ids, np.diff(inputs.query_start))
    tokens = tiles_of(places, num_tokens, num_adapters)
    return tokens, tiles_of(places[inputs.logit_rows], num_logits, num_adapters)


def _layers(model: Decoder) -> Iterator[tuple[str, _Layer]]:
    """The layers that adapters may change. The paths are those of a model of plain layers, because
    packed and quantized ones do not tell their parts.
    """
    with torch.device("meta"):
        plain = type(model)(model.config)
    yield "embed", _Layer((EMBED,), (model.config.hidden_size,), model.config.vocab_size)
    for path, module in plain.named_modules():
        if not isinstance(module, Linear):
            continue
        rows, columns = module.weight.shape
        parent = path.rpartition(".")[0]
        if module.parts:
            names = tuple(f"{parent}.{name}.weight" for name, _ in module.parts)
            yield path, _Layer(names, tuple(size for _, size in module.parts), columns)
        else:
            yield path, _Layer((f"{path}.weight",), (rows,), columns)
