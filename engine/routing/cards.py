"""The combined model card of several backends: what all of them support."""

from collections.abc import Sequence
from typing import TypeVar

from engine.core.interfaces.backend import ModelCard

T = TypeVar("T")


def combined_card(model_id: str, cards: Sequence[ModelCard]) -> ModelCard:
    """A request that this card allows can go to any of the backends. `lacks` is their union."""
    lacks = tuple(dict.fromkeys(name for card in cards for name in card.lacks))
    emulated = dict.fromkeys(name for card in cards for name in card.emulated)
    trained = [card.trained_context for card in cards if card.trained_context is not None]
    return ModelCard(
        id=model_id,
        created=min(card.created for card in cards),
        owned_by=_same([card.owned_by for card in cards]) or "engine",
        max_model_len=min(card.max_model_len for card in cards),
        backend="+".join(dict.fromkeys(card.backend for card in cards)),
        quantization=_same([card.quantization for card in cards]),
        num_params=_same([card.num_params for card in cards]),
        size_bytes=_same([card.size_bytes for card in cards]),
        capabilities=_in_all([card.capabilities for card in cards]),
        emulated=tuple(name for name in emulated if name not in lacks),
        lacks=lacks,
        template_options=_in_all([card.template_options for card in cards]),
        trained_context=min(trained, default=None),
        num_dimensions=_same([card.num_dimensions for card in cards]),
    )


def _in_all(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(name for name in names[0] if all(name in each for each in names))


def _same(values: Sequence[T | None]) -> T | None:
    """The value, if all are equal, else None."""
    return values[0] if all(value == values[0] for value in values) else None
