"""Whether our attention can stand in for a model's own: what its configuration rules out, and what
its layers ask for when they are tried.
"""

from typing import Any

from torch import Tensor

from engine.backends.custom.frameworks.torch.execution.cache import KVShape
from engine.backends.transformers.attention import NAME, record
from engine.backends.transformers.loading import one_line

# A rotation that depends on the longest sequence of a pass would depend on a row's neighbours.
_CHANGING_ROPES = frozenset({"dynamic", "longrope"})
# What may occur in a configuration and is told by its layers' types and windows.
_KNOWN_LIMITS = frozenset(
    {
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "max_window_layers",
        "chunk_size_feed_forward",
    }
)
# What a model raises that does not know what it is given.
FORWARD_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)


def kv_shape(model: Any, prompt: Tensor) -> KVShape | str:
    """What each layer keeps of a token, or why ours can't be used. It is in use afterwards."""
    config = model.config.get_text_config()
    reason = _ruled_out(model, config)
    if reason is not None:
        return reason
    model.set_attn_implementation(NAME)
    try:
        calls = record(model, prompt).calls
    except FORWARD_ERRORS as error:
        return f"its attention can't be replaced ({type(error).__name__}: {one_line(error)})"
    if not calls:
        return "its attention can't be replaced"
    layers, facts = [layer for layer, _ in calls], [each for _, each in calls]
    if sorted(layers) != list(range(len(layers))):
        return "its layers share keys and values"
    others = sorted(frozenset[str]().union(*(each.others for each in facts)))
    if others:
        return f"its attention considers {', '.join(others)}"
    if len({(each.num_kv_heads, each.head_dim, each.value_dim) for each in facts}) > 1:
        return "its layers keep keys of different sizes"
    if facts[0].value_dim > facts[0].head_dim:
        return "its values are larger than its keys"
    expected = _windows(config, len(layers))
    if any(each.scoring.window != expected[layer] for layer, each in calls):
        return "its layers do not tell their windows"
    return KVShape(len(layers), facts[0].num_kv_heads, facts[0].head_dim)


def _ruled_out(model: Any, config: Any) -> str | None:
    if model._is_stateful:
        return "it keeps a state that is not one of keys and values"
    if not model._supports_attention_backend:
        return "its attention can't be replaced"
    kinds = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    if any(each.get("rope_type") in _CHANGING_ROPES for each in ropes):
        return "its rotation depends on the longest sequence"
    for name, value in vars(config).items():
        limits = ("window" in name or "chunk" in name) and name not in _KNOWN_LIMITS
        if limits and type(value) is int:
            return f"its attention is limited by {name}"
    return None


def _windows(config: Any, num_layers: int) -> list[int | None]:
    """What the configuration says of each layer's window."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return [None] * num_layers
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [window] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
