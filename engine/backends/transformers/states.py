"""The states that a model's head reads, which its output does not tell."""

from typing import Any

from torch import Tensor, nn


class FinalStates:
    """Keeps what the model below the head gave in the last forward pass."""

    def __init__(self, model: Any) -> None:
        self._states: Tensor | None = None
        # Some heads ask the decoder inside it directly. Where both are asked, the outer is later.
        for module in {model.base_model, model.get_decoder()} - {model}:
            module.register_forward_hook(self._keep)

    def take(self) -> Tensor:
        """(batch, tokens, D), normed; once for each forward pass."""
        states, self._states = self._states, None
        assert states is not None, "the model below the head was not asked"
        return states

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._states = output[0]
