"""Captures the hidden states that a model's head reads, which its output does not include."""

from typing import Any

from torch import Tensor, nn


class FinalStates:
    """Keeps the base model's output of the last forward pass."""

    def __init__(self, model: Any) -> None:
        self._states: Tensor | None = None
        # Some heads call the inner decoder directly. If both are called, the outer one is later.
        for module in {model.base_model, model.get_decoder()} - {model}:
            module.register_forward_hook(self._keep)

    def take(self) -> Tensor:
        """(batch, tokens, D), after the final norm. Call once per forward pass."""
        states, self._states = self._states, None
        assert states is not None, "the model below the head was not asked"
        return states

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._states = output[0]
