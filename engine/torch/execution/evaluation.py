"""Runs a model in float32 on whole sequences, to measure its quality. Can record what its linear
layers are multiplied with, for importance matrices.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.torch.layers.linear import Linear
from engine.torch.models.base import Decoder
from engine.torch.models.loading import build_model
from engine.weights.model import ModelSource


class Evaluated:
    """A model in float32 on the CPU, with dequantized weights. After loading, the source may be
    closed.
    """

    def __init__(self, source: ModelSource, max_tokens: int) -> None:
        cpu = torch.device("cpu")
        self.model: Decoder = build_model(
            source.config, source.weights, max_tokens, cpu, torch.float32
        )

    @torch.no_grad()
    def logits(self, window: list[int]) -> NDArray[np.float32]:
        """The logits after each token, (T, V)."""
        logits: NDArray[np.float32] = self.model.forward_sequence(torch.tensor(window)).numpy()
        return logits


class SquaredInputs(TorchFunctionMode):
    """Sums the squares of the inputs of every matmul with a layer's weight. The LM head is left
    out, because it has more bits in every mix of types.
    """

    def __init__(self, evaluated: Evaluated) -> None:
        super().__init__()
        self._evaluated = evaluated
        model: nn.Module = evaluated.model
        self._layers: dict[int, tuple[str, Linear]] = {
            id(layer.weight): (path, layer)
            for path, layer in model.named_modules()
            if isinstance(layer, Linear) and path != "head"
        }
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and id(args[1]) in self._layers:
            key, inputs = id(args[1]), args[0].detach().flatten(0, -2)
            squares = inputs.double().square().sum(0)
            self._sums[key] = self._sums.get(key, torch.zeros_like(squares)) + squares
            self._counts[key] = self._counts.get(key, 0) + len(inputs)
        return func(*args, **(kwargs or {}))

    def add(self, window: list[int]) -> None:
        with self:
            self._evaluated.logits(window)

    def sums(self) -> dict[str, tuple[NDArray[np.float32], int]]:
        """By the engine's name of a weight: the sum of squares of each input column, and the number
        of tokens. The parts of a fused matrix have the same inputs.
        """
        found: dict[str, tuple[NDArray[np.float32], int]] = {}
        for key, sums in self._sums.items():
            path, layer = self._layers[key]
            parent = path.rpartition(".")[0]
            names = [f"{parent}.{part}" for part, _ in layer.parts] or [path]
            squares = sums.float().numpy()
            found |= {f"{name}.weight": (squares, self._counts[key]) for name in names}
        return found
