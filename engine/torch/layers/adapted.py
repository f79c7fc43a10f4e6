"""Linear layers and embeddings with LoRA adapters. They take the place of the plain layers in a
second tree of modules, which shares its tensors with the model. Only steps that have rows with
adapters run that tree.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.torch.kernels.fp8 import QuantizedRows
from engine.torch.kernels.lora import LoraStack, lora_embed, lora_linear, places_of
from engine.torch.layers.norm import RMSNorm


@dataclass(slots=True)
class AdapterTiles:
    """The tiles of the step that runs now (see `kernels.lora`): of its tokens, and of the tokens
    whose logits are computed. A runner sets them before each step. `yields`: see `lora_linear`.
    """

    tokens: Tensor
    logits: Tensor
    yields: bool = False


class AdaptedLinear(nn.Module):
    """A linear layer of any kind, `base`, and what adapters add to its result."""

    def __init__(
        self, base: nn.Module, stack: LoraStack, tiles: AdapterTiles, is_head: bool
    ) -> None:
        super().__init__()
        self.base = base
        self.is_invariant = bool(getattr(base, "is_invariant", False))
        self._stack, self._tiles, self._is_head = stack, tiles, is_head

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        return self._sum(lambda: x, lambda: self.base(x))

    def fused(
        self,
        x: Tensor | QuantizedRows,
        *,
        norm: RMSNorm | None = None,
        gate: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if norm is None and residual is None:
            return self._sum(lambda: x, lambda: self.base(x), gate)
        assert gate is None or residual is None, "the activation would change the residual"
        return self._sum(
            lambda: x if norm is None else norm(x),
            lambda: self.base.fused(x, norm=norm, residual=residual),  # type: ignore[operator]
            gate,
        )

    def _sum(
        self,
        read: Callable[[], Tensor | QuantizedRows],
        product: Callable[[], Tensor],
        gate: str | None = None,
    ) -> Tensor:
        tiles = self._tiles.logits if self._is_head else self._tiles.tokens
        return lora_linear(
            tiles,
            self._stack,
            lambda: self._plain(read()),
            product,
            gate,
            self._tiles.yields,
        )

    def _plain(self, x: Tensor | QuantizedRows) -> Tensor:
        if isinstance(x, QuantizedRows):
            return (x.values.float() * x.scales).to(self._stack.a.dtype)
        return x


class AdaptedEmbedding(nn.Module):
    def __init__(self, base: nn.Module, stack: LoraStack, tiles: AdapterTiles) -> None:
        super().__init__()
        self.base = base
        self._stack, self._tiles = stack, tiles

    def forward(self, ids: Tensor) -> Tensor:
        return lora_embed(self.base(ids), ids, self._stack.a, self._stack.b, self._tiles.tokens)


class ReplacedMatrix(nn.Module):
    """The embeddings or the head, `base`. Some adapters have a whole matrix in place of it, by the
    place of the adapter.
    """

    def __init__(
        self, base: nn.Module, whole: Mapping[int, Tensor], tiles: AdapterTiles, is_head: bool
    ) -> None:
        super().__init__()
        self.base = base
        self.is_invariant = bool(getattr(base, "is_invariant", False))
        self._whole, self._tiles, self._is_head = whole, tiles, is_head

    def forward(self, x: Tensor) -> Tensor:
        return self._replaced(x, self.base(x))

    def fused(self, x: Tensor, *, norm: RMSNorm | None = None) -> Tensor:
        y = self.base.fused(x, norm=norm)  # type: ignore[operator]
        return self._replaced(x if norm is None else norm(x), y)

    def _replaced(self, x: Tensor, y: Tensor) -> Tensor:
        places = places_of(self._tiles.logits if self._is_head else self._tiles.tokens, len(y))
        for place, matrix in self._whole.items():
            own = F.linear(x, matrix) if self._is_head else F.embedding(x, matrix)
            y = torch.where((places == place)[:, None], own, y)
        return y


def adapted(
    module: nn.Module,
    stacks: Mapping[str, LoraStack],
    whole: Mapping[str, Mapping[int, Tensor]],
    tiles: AdapterTiles,
    path: str = "",
) -> nn.Module:
    """A copy of a tree of modules that shares its tensors. The layers that `stacks` or `whole`
    names by their paths have adapters.
    """
    if path in whole:
        base = adapted(module, stacks, {}, tiles, path)  # it has no layers below it
        return ReplacedMatrix(base, whole[path], tiles, path == "head")
    if (stack := stacks.get(path)) is not None:
        if path == "embed":
            return AdaptedEmbedding(module, stack, tiles)
        return AdaptedLinear(module, stack, tiles, path == "head")
    twin = copy.copy(module)
    children = {
        name: None
        if child is None
        else adapted(child, stacks, whole, tiles, f"{path}.{name}" if path else name)
        for name, child in module._modules.items()
    }
    twin._modules = children
    return twin


def empty_tiles(device: torch.device) -> Tensor:
    return torch.zeros((1, 3), dtype=torch.int32, device=device)
