"""Converts a `ModelConfig` to the contents of config.json or to GGUF metadata.

Each family lists the keys of its plain fields (`hf_keys`, `gguf_keys`). This module adds what is
not a plain field: RoPE scaling rules, sliding windows and activations. The result is parsed again
and compared with the original config. If they differ, the format cannot express the model, and an
error is raised. So no file is written that would load as a different model.
"""

from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import numpy as np

from engine.architectures.base import LatentConfig, ModelConfig, RopeConfig
from engine.architectures.family import Family, Keys
from engine.architectures.rope import with_long_factors, yarn_magnitude
from engine.core.errors import ModelFormatError
from engine.core.registry.model_registry import architecture

_HF_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu2": "relu2",
    "swiglu_oai": "silu",
}
_SHOWN = 120  # max characters of a setting in an error
# Config fields that are not compared after writing. Token ids are part of the tokenizer. In GGUF,
# the remaining fields have no key, because the tensors of the file imply them.
_UNSTATED_HF = frozenset({"bos_id", "eos_ids"})
_UNSTATED_GGUF = _UNSTATED_HF | {"tie_embeddings", "qkv_bias", "out_bias", "mlp_bias", "qk_norm"}
# The RoPE scaling rules of the published Llama 3.1 and 3.2 models. GGUF files of these models do
# not store the rule, only the frequency factors that result from it.
KNOWN_LLAMA3_RULES = (
    {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192},
    {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192},
)


def text_only(config: ModelConfig) -> ModelConfig:
    """The config of the text model of a model that reads images."""
    if config.vision is None:
        return config
    rope = config.rope if config.rope is None else replace(config.rope, sections=())
    return replace(config, vision=None, rope=rope)


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The contents of config.json. `dtype` is PyTorch's name for the type of the weights, such as
    "bfloat16".
    """
    family = _exporting(config)
    name, kind = family.hf_names[0], config.family
    if family.hf_kind is not None:
        name, kind = family.hf_kind(config)
    stated: dict[str, Any] = {
        "architectures": [name],
        "model_type": kind,
        **_fields(config, family.hf_keys),
        family.hf_activation[0]: _HF_ACTIVATIONS[config.activation],
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) if len(config.eos_ids) > 1 else _first(config.eos_ids),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if config.rope is not None:
        head = config.head_dim if config.latent is None else config.latent.rope_dim
        stated |= _rope_to_hf(config.rope, head)
    stated |= {**_layers_to_hf(config), **family.hf_written(config)}
    if config.latent is not None:
        stated |= _latent_to_hf(config, config.latent, stated.get("rope_scaling"))
    if family.name == "gemma2" or family.name == "gemma3":
        stated["query_pre_attn_scalar"] = config.attention_scale**-2
    stated = {key: value for key, value in stated.items() if value is not None}
    if config.latent is not None:
        stated.setdefault("q_lora_rank", None)  # Transformers has another default
    _check_same(config, family.config_from_hf(stated), _UNSTATED_HF, "a config.json")
    return stated


def gguf_metadata(config: ModelConfig) -> dict[str, Any]:
    """The GGUF metadata that describes the model, without the tokenizer and the model's name."""
    family = _exporting(config)
    prefix = family.gguf_names[0]
    stated: dict[str, Any] = {"general.architecture": prefix}
    keys = {f"{prefix}.{key}": name for key, name in (family.gguf_keys or {}).items()}
    stated |= _fields(config, keys)
    if config.rope is not None:
        stated |= {f"{prefix}.rope.{key}": v for key, v in _rope_to_gguf(config.rope).items()}
    layers = {**_layers_to_gguf(config), **family.gguf_written(config)}
    stated |= {f"{prefix}.{key}": value for key, value in layers.items()}
    if config.experts is not None and config.experts.shared_size == config.experts.size:
        stated[f"{prefix}.expert_shared_count"] = 1
    if config.latent is not None:
        stated |= {f"{prefix}.{k}": v for k, v in _latent_to_gguf(config, config.latent).items()}
        stated.pop(f"{prefix}.rope.scaling.attn_factor", None)  # no file of this family has it
    if config.norm == "layer" and config.rope is not None:
        stated[f"{prefix}.use_parallel_residual"] = config.parallel is not None
    read, rope = family.config_from_gguf(stated), config.rope
    if rope is not None and rope.kind == "longrope":
        read = with_long_factors(read, stated, rope.short_factors, rope.long_factors)
    if config.state is not None and read.state is not None:  # the tensors imply its biases
        biases = (config.state.conv_bias, config.state.proj_bias)
        state = replace(read.state, conv_bias=biases[0], proj_bias=biases[1])
        read = replace(read, state=state)
    _check_same(config, read, _UNSTATED_GGUF, "a GGUF file")
    return stated


def _layers_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys for windows, for RoPE settings that differ between layers and for layers without."""
    layers = [config.layer(index) for index in range(config.num_layers)]
    window = next((layer.window for layer in layers if layer.window is not None), None)
    stated: dict[str, Any] = {"sliding_window": window}
    if window is not None:
        kinds = {True: "sliding_attention", False: "full_attention"}
        stated |= {"use_sliding_window": True, "max_window_layers": 0}
        if config.layers:
            stated["layer_types"] = [kinds[layer.window is not None] for layer in layers]
        local = next(layer.rope for layer in layers if layer.window is not None)
        if local is not None and config.rope is not None and local != config.rope:
            stated["rope_parameters"] = {
                name: _rope_parameters(rope, config.head_dim)
                for name, rope in (("sliding_attention", local), ("full_attention", config.rope))
            }
    elif any(layer.rope != config.rope for layer in layers):
        stated["no_rope_layers"] = [int(layer.rope is not None) for layer in layers]
    return stated


def _rope_parameters(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """RoPE settings in the form of `rope_parameters`, which has all of them in one object."""
    stated = _rope_to_hf(rope, head_dim)
    return {**stated.pop("rope_scaling", {"rope_type": "default"}), **stated}


def _layers_to_gguf(config: ModelConfig) -> dict[str, Any]:
    layers = [config.layer(index) for index in range(config.num_layers)]
    stated: dict[str, Any] = {}
    if not layers[0].experts and config.experts is not None:
        dense = [layer.experts for layer in layers].index(True)
        stated["leading_dense_block_count"] = dense
    local = next((layer for layer in layers if layer.window is not None), None)
    if local is None:
        return stated
    stated["attention.sliding_window"] = local.window
    if config.layers:
        pattern = np.array([layer.window is not None for layer in layers], np.bool_)
        stated["attention.sliding_window_pattern"] = pattern
        if local.rope is not None and config.rope is not None:
            stated["rope.freq_base_swa"] = local.rope.theta
    return stated


def _latent_to_hf(
    config: ModelConfig, latent: LatentConfig, scaling: dict[str, Any] | None
) -> dict[str, Any]:
    """The keys of latent attention, and those of experts in models that have it."""
    stated: dict[str, Any] = {}
    if scaling is not None and latent.mscale:
        stated["rope_scaling"] = {**scaling, "mscale_all_dim": latent.mscale}
    experts = config.experts
    if experts is not None:
        sparse = [config.layer(index).experts for index in range(config.num_layers)]
        greedy = "greedy" if experts.groups == 1 else "group_limited_greedy"
        stated |= {
            "first_k_dense_replace": sparse.index(True),
            "n_shared_experts": experts.shared_size // experts.size,
            "topk_method": "noaux_tc" if experts.correction else greedy,
        }
    return stated


def _latent_to_gguf(config: ModelConfig, latent: LatentConfig) -> dict[str, Any]:
    """The keys of latent attention, and those of experts in models that have it."""
    stated: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.key_length": config.head_dim,
        "attention.value_length": latent.kv_rank,
        "attention.key_length_mla": latent.nope_dim + latent.rope_dim,
        "attention.value_length_mla": latent.value_dim,
    }
    if latent.mscale:
        stated["rope.scaling.yarn_log_multiplier"] = 0.1 * latent.mscale
    if config.experts is not None:
        stated["expert_shared_count"] = config.experts.shared_size // config.experts.size
        stated["expert_gating_func"] = 2 if config.experts.scoring == "sigmoid" else 1
    return stated


def _check_same(
    config: ModelConfig, read: ModelConfig, unstated: frozenset[str], where: str
) -> None:
    for field in fields(config):
        meant, found = getattr(config, field.name), getattr(read, field.name)
        if field.name not in unstated and meant != found:
            raise ModelFormatError(
                f"{where} of the family '{config.family}' cannot say that {field.name} is "
                f"{str(meant)[:_SHOWN]}; keep the model in its present format"
            )


def _exporting(config: ModelConfig) -> Family:
    family = architecture(config.family)
    if not isinstance(family, Family) or family.gguf_keys is None:
        raise ModelFormatError(
            f"models of the family '{config.family}' cannot be converted: it has no table of keys"
        )
    return family


def _fields(config: ModelConfig, keys: Keys) -> dict[str, Any]:
    """The keys of a file with their values, taken from the config. If a key stands for several
    fields, its value is the first field's. A key whose field is None is left out.
    """
    values: dict[str, Any] = {}
    for key, names in keys.items():
        name = names if isinstance(names, str) else names[0]
        field = name.removeprefix("1/")
        if field.startswith("experts.") and config.experts is None:
            continue
        if field.startswith("state.") and config.state is None:
            continue
        value = attrgetter(field)(config)
        if value is not None:
            values[key] = value if name == field else 1 / value
    return values


def _rope_to_hf(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    stated: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.dim != head_dim:
        stated["partial_rotary_factor"] = rope.dim / head_dim
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    match rope.kind:
        case "default":
            return stated
        case "linear" | "dynamic":
            pass
        case "longrope":
            stated["original_max_position_embeddings"] = rope.original_max_position
            scaling |= {
                "short_factor": list(rope.short_factors),
                "long_factor": list(rope.long_factors),
                "attention_factor": rope.attention_factor,
            }
        case "llama3" | "yarn":
            scaling |= {
                "original_max_position_embeddings": rope.original_max_position,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "beta_fast": rope.beta_fast,
                "beta_slow": rope.beta_slow,
                "attention_factor": rope.attention_factor,
            }
            if not rope.truncate:
                scaling["truncate"] = False
        case "factors":
            raise ModelFormatError(
                "the model stores rotary frequency factors of no published rule, which a "
                "config.json cannot say; keep it as GGUF"
            )
    return stated | {"rope_scaling": {k: v for k, v in scaling.items() if v is not None}}


def _rope_to_gguf(rope: RopeConfig) -> dict[str, Any]:
    stated: dict[str, Any] = {"freq_base": rope.theta, "dimension_count": rope.dim}
    match rope.kind:
        case "default" | "factors":  # a GGUF file stores frequency factors as a tensor, not a key
            return stated
        case "longrope":  # these factors are tensors, too
            stated["scaling.original_context_length"] = rope.original_max_position
            if rope.attention_factor is not None:
                stated["scaling.attn_factor"] = rope.attention_factor
            return stated
        case "linear":
            return stated | {"scaling.type": "linear", "scaling.factor": rope.factor}
        case "yarn":
            stretch = rope.attention_factor
            if stretch is not None:
                stretch /= yarn_magnitude(rope.factor, 1.0)
            scaling: dict[str, Any] = {
                "scaling.type": "yarn",
                "scaling.factor": rope.factor,
                "scaling.original_context_length": rope.original_max_position,
                "scaling.yarn_beta_fast": rope.beta_fast,
                "scaling.yarn_beta_slow": rope.beta_slow,
                "scaling.attn_factor": stretch,
            }
            return stated | {key: value for key, value in scaling.items() if value is not None}
        case "dynamic" | "llama3":
            raise ModelFormatError(
                f"GGUF knows no '{rope.kind}' rotary scaling; keep the model as safetensors"
            )


def llama3_rules(rope: RopeConfig) -> list[RopeConfig]:
    """The published Llama 3 scaling rules. One of them may have produced the frequency factors in a
    GGUF file. The caller compares.
    """
    assert rope.kind == "factors", rope
    return [
        RopeConfig(
            rope.theta,
            rope.dim,
            "llama3",
            factor=rule["factor"],
            original_max_position=int(rule["original"]),
            low_freq_factor=rule["low_freq_factor"],
            high_freq_factor=rule["high_freq_factor"],
        )
        for rule in KNOWN_LLAMA3_RULES
    ]


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
