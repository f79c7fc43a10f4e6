"""Loads a checkpoint's weights into a parameter tree, for frameworks with functional layers.

The dots of a weight's name separate the levels of the tree, and numbers are list indices:
"layers.3.attn.q.weight" is `tree["layers"][3]["attn"]["q"]["weight"]`. Each weight is dequantized,
copied to its device and freed before the next weight is read. So the host holds at most one float32
tensor at a time.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import ExpertsConfig, LayerConfig, ModelConfig
from engine.core.errors import ModelFormatError

ROPE_FACTORS = "rope.factors"
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # of the activation "swiglu_oai"
# The config fields that the functional decoders implement, by class.
IMPLEMENTED = {
    ModelConfig: frozenset(
        (
            *("family", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"),
            *("head_dim", "intermediate_size", "max_position", "norm_eps", "tie_embeddings"),
            *("rope", "norm", "norm_bias", "norm_placement", "parallel", "activation", "qkv_bias"),
            *("out_bias", "mlp_bias", "gated_mlp", "qk_norm", "sliding_window", "layers"),
            *("experts", "attention_softcap", "logits_softcap", "attention_sinks", "alibi_bias"),
            *("bos_id", "eos_ids", "embedding_multiplier", "residual_multiplier"),
            # The image encoder is no part of the decoder. Requests with images are refused if the
            # framework has none.
            *("attention_multiplier", "logits_scaling", "latent", "vision"),
        )
    ),
    LayerConfig: frozenset(("window", "rope", "experts")),
    ExpertsConfig: frozenset(
        (
            *("count", "per_token", "size", "scoring", "renormalizes", "scale", "groups"),
            *("groups_per_token", "group_score", "correction", "router_bias", "bias"),
            *("shared_size", "shared_gate"),
        )
    ),
}


class Weight(Protocol):
    def numpy(self) -> NDArray[np.float32]:
        """The dequantized tensor, (out, in) for a matrix."""
        ...


def check_decoder(config: ModelConfig, framework: str, also: Collection[str] = ()) -> None:
    """Raises `ModelFormatError` if the model is a text encoder, or if its config has a setting that
    the decoders do not implement. `also` are the settings that only this framework implements.
    """
    if config.encoder is not None or config.norm_placement == "sum":
        raise ModelFormatError(
            f"the {framework} framework has no decoder for family '{config.family}'"
        )
    for kind, each in ((ModelConfig, config), *((LayerConfig, layer) for layer in config.layers)):
        _check_fields(kind, each, framework, config.family, also)
    if config.experts is not None:
        _check_fields(ExpertsConfig, config.experts, framework, config.family, also)


def _check_fields(
    kind: type, config: Any, framework: str, family: str, also: Collection[str]
) -> None:
    known = {*IMPLEMENTED[kind], *also}
    for field in fields(config):
        if field.name not in known and getattr(config, field.name) != field.default:
            raise ModelFormatError(
                f"the {framework} framework does not implement '{field.name}', which this model of "
                f"family '{family}' sets; use --backend native or --backend torch"
            )


def rope_factors(weights: Mapping[str, Weight]) -> NDArray[np.float32] | None:
    """The factors by which RoPE frequencies are divided. None if the checkpoint has no factors."""
    factors = weights.get(ROPE_FACTORS)
    return None if factors is None else factors.numpy()


def parameter_tree(
    weights: Mapping[str, Weight],
    decode: Callable[[Weight], Any],
    place: Callable[[str, Any], Any],
) -> dict[str, Any]:
    """Builds the tree of all weights. `decode` converts a weight to an array. `place` gets the
    weight's name and this array, and returns what the tree stores, such as a copy on a device.
    """
    tree: dict[str, Any] = {}
    for name, weight in weights.items():
        if name == ROPE_FACTORS:
            continue
        *path, kind = name.split(".")
        branch = tree
        for key in path:
            branch = branch.setdefault(key, {})
        branch[kind] = place(name, decode(weight))
    tree["layers"] = [tree["layers"][str(i)] for i in range(len(tree["layers"]))]
    return tree
