"""Captures the hidden states that a model's LM head reads. The model's output does not include
them.
"""

from typing import Any

from torch import Tensor, nn


class FinalStates:
    """Keeps the hidden states of the last forward pass."""

    def __init__(self, model: Any) -> None:
        self._states: Tensor | None = None
        # Some models call the inner decoder directly, others call the base model. If both are
        # called, the base model ends last, so its output is kept.
        for module in {model.base_model, model.get_decoder()} - {model}:
            module.register_forward_hook(self._keep)

    def take(self) -> Tensor:
        """The hidden states after the final norm, (batch, tokens, D). Call it once per forward
        pass.
        """
        states, self._states = self._states, None
        assert states is not None, "the model below the head was not asked"
        return states

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._states = output[0]
