"""The LoRA adapters of a PyTorch model: packs them, and keeps those with a place on the device.

The matrices of all places are stacked, so that one kernel computes any mix of adapters. Stacks grow
when an adapter has a larger rank, changes a layer that no other did, or gets a higher place.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backends.custom.adapters.matrices import EMBED, Adapter, LoraPair
from engine.backends.custom.frameworks.torch.execution.transfer import to_device
from engine.backends.custom.frameworks.torch.kernels.lora import TILE_ROWS
from engine.backends.custom.frameworks.torch.layers.adapted import (
    AdapterTiles,
    Stack,
    adapted,
    empty_tiles,
)
from engine.backends.custom.frameworks.torch.layers.linear import Linear
from engine.backends.custom.frameworks.torch.models.base import Decoder
from engine.backends.custom.runtime.model_runner import I32, BatchInputs

_RANK_STEP, _PLACE_STEP = 16, 8


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """The pairs of each layer, by the layer's path. A fused layer has one for each of its parts, or
    None.
    """

    pairs: dict[str, tuple[LoraPair | None, ...]]
    max_rank: int
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
        self._held: dict[int, PackedAdapter] = {}
        self._stacks: dict[str, Stack] = {}
        self._rank = self._num_places = 0
        self.tiles = AdapterTiles(empty_tiles(device), empty_tiles(device))
        self.model = model  # the tree of modules with adapters
        self.version = (
            0  # changes if tensors were replaced, which captured graphs have addresses of
        )

    def pack(self, adapter: Adapter) -> PackedAdapter:
        pairs = {}
        for path, layer in self._layers.items():
            found = tuple(adapter.pairs.get(part) for part in layer.parts)
            if any(pair is not None for pair in found):
                pairs[path] = found
        return PackedAdapter(pairs, adapter.max_rank, adapter.num_bytes)

    @torch.inference_mode()
    def set(self, number: int, packed: PackedAdapter) -> None:
        self._held[number] = packed
        if (
            packed.max_rank > self._rank
            or number >= self._num_places
            or packed.pairs.keys() - self._stacks.keys()
        ):
            self._grow(number, packed)
            return
        self._write(number, packed)

    def _grow(self, number: int, packed: PackedAdapter) -> None:
        self._rank = max(self._rank, -(-packed.max_rank // _RANK_STEP) * _RANK_STEP)
        self._num_places = max(self._num_places, -(-(number + 1) // _PLACE_STEP) * _PLACE_STEP)
        for path in dict.fromkeys([*self._stacks, *packed.pairs]):
            layer = self._layers[path]
            ranks = self._rank * len(layer.parts)
            options = {"dtype": self._dtype, "device": self._device}
            self._stacks[path] = Stack(
                torch.zeros((self._num_places, ranks, layer.columns), **options),
                torch.zeros((self._num_places, sum(layer.rows), ranks), **options),
            )
        for place, held in self._held.items():
            self._write(place, held)
        twin = adapted(self._base, self._stacks, self.tiles)
        assert isinstance(twin, Decoder)
        self.model = twin
        self.version += 1

    def _write(self, number: int, packed: PackedAdapter) -> None:
        for path, stack in self._stacks.items():
            layer, pairs = self._layers[path], packed.pairs.get(path, ())
            a, b = torch.zeros_like(stack.a[0]), torch.zeros_like(stack.b[0])
            row = 0
            for index, (rows, pair) in enumerate(zip(layer.rows, pairs, strict=False)):
                if pair is not None:
                    first = index * self._rank
                    a[first : first + pair.rank] = self._put(pair.a)
                    b[row : row + rows, first : first + pair.rank] = self._put(pair.b)
                row += rows
            stack.a[number].copy_(a)
            stack.b[number].copy_(b)

    def begin(self, inputs: BatchInputs) -> None:
        """Set the tiles for a step. Its kernels are launched one by one."""
        places = token_places(inputs)
        self.tiles.tokens = to_device(tiles_of(places), self._device)
        self.tiles.logits = to_device(tiles_of(places[inputs.logit_rows]), self._device)

    def _put(self, values: np.ndarray) -> Tensor:
        return to_device(values, self._device).to(self._dtype)


def token_places(inputs: BatchInputs) -> I32:
    """The place of the adapter of each token, (T,)."""
    places: I32 = np.repeat(inputs.adapter_ids, np.diff(inputs.query_start))
    return places


def tiles_of(places: I32, room: int | None = None) -> I32:
    """The tiles of rows with these places, (N, 3). Padded to `room` tiles, or to at least one."""
    edges = np.flatnonzero(np.diff(places, prepend=-1, append=-1))
    tiles = [
        (start, min(TILE_ROWS, end - start), places[first])
        for first, end in zip(edges[:-1], edges[1:], strict=True)
        if places[first]
        for start in range(first, end, TILE_ROWS)
    ]
    padded = np.zeros((max(len(tiles), room or 1), 3), np.int32)
    padded[: len(tiles)] = np.array(tiles, np.int32).reshape(-1, 3)
    return padded


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
