"""Hybrids with Mamba-2: Granite 4 and Nemotron-H."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine.architectures.base import LayerConfig, ModelConfig, Reader
from engine.architectures.common import (
    ATTENTION_BIAS,
    GGUF_EXPERT_KEYS,
    GGUF_PAIRED,
    HF_KEYS,
    MLP_BIAS,
    Rows,
    attention,
    decoder,
    has_experts,
    has_mixer,
    has_shared,
    input_norms,
    is_dense,
    layer_keys,
    renamed,
    row,
)
from engine.architectures.family import Family, Settings
from engine.architectures.hybrids.lfm2 import (
    GGUF_STATE,
    HYBRID_GGUF_KEYS,
    LINEAR,
    conv_row,
    gguf_mixers,
    has_state,
    inner_size,
    kv_heads,
    layer_mixers,
    layers_of,
    mixer_row,
    vector_row,
    with_head_dim,
    written_types,
)
from engine.architectures.hybrids.states import Mixer
from engine.architectures.llama import GRANITE_GGUF_KEYS, GRANITE_HF_KEYS
from engine.architectures.weight_rows import Stored, WeightRow
from engine.core.errors import ModelFormatError


def _mamba2(hf: str) -> Rows:
    """The weights of Mamba-2. `hf` is the prefix of their names."""
    plain, column = Stored(), Stored(shape="T1")
    bias, norm = "state.proj_bias", Stored(shape="OZ")
    return (
        mixer_row("in", "JD", f"{hf}.in_proj", "ssm_in", bias),
        conv_row(f"{hf}.conv1d", "ssm_conv1d"),
        vector_row("dt_bias", "T", f"{hf}.dt_bias", "ssm_dt.bias", plain, plain),
        vector_row("decay", "T", f"{hf}.A_log", "ssm_a", Stored(is_log=True), column),
        vector_row("skip", "T", f"{hf}.D", "ssm_d", plain, column),
        row("mixer.norm", "I", f"{hf}.norm", "ssm_norm", None, has_state, plain, norm),
        mixer_row("o", "DI", f"{hf}.out_proj", "ssm_out", bias),
    )


def _check_time_steps(reader: Reader) -> None:
    """Rejects bounds of the time steps. Files state the missing bound in several ways."""
    limits = reader.source.get("time_step_limit")
    unbounded = ([0, float("inf")], [0, {"__float__": "Infinity"}])
    if limits is not None and limits not in unbounded:
        raise ModelFormatError("config.json: key 'time_step_limit': bounds are not supported")


def _granite_view(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without experts, the MLP is what a config.json calls the shared expert."""
    if config.get("num_local_experts"):
        return config
    shared = Reader(config, "config.json").read(int, "shared_intermediate_size", default=1024)
    return {**config, "intermediate_size": shared, "shared_intermediate_size": 0}


def _granite_layers(found: Settings, mixers: list[Mixer], rotates: bool) -> Settings:
    rope = found["rope"] if rotates else None
    state = found["state"] if "mamba2" in mixers else None
    return {"rope": rope, "state": state, **layers_of({**found, "rope": rope}, mixers)}


def _granite_from_hf(reader: Reader, found: Settings) -> Settings:
    _check_time_steps(reader)
    state, hidden = found["state"], found["hidden_size"]
    size = reader.source.get("mamba_d_head")
    if size in (None, "auto"):
        inner = reader.read(int, "mamba_expand", default=2) * hidden
        size = inner // state.heads if state.heads > 0 else 0
    if not isinstance(size, int) or isinstance(size, bool):
        raise ModelFormatError("config.json: key 'mamba_d_head' must be a number or 'auto'")
    mixers = layer_mixers(reader, found["num_layers"], {LINEAR: "mamba2"})
    rotates = reader.read(str, "position_embedding_type", default=None) == "rope"
    return _granite_layers({**found, "state": replace(state, head_dim=size)}, mixers, rotates)


def _granite_from_gguf(reader: Reader, found: Settings) -> Settings:
    """Files say with `rope.scaling.finetuned` whether attention rotates queries and keys."""
    state = with_head_dim(reader, found["state"])
    found = {**found, "state": replace(state, norm_groups=max(1, state.groups))}
    prefix = reader.read(str, "general.architecture")
    rotates = reader.read(bool, f"{prefix}.rope.scaling.finetuned", default=True)
    settings = gguf_mixers(reader, found, "mamba2")
    mixers = [layer.mixer for layer in settings["layers"]]
    return {**settings, **_granite_layers(found, mixers, rotates)}


def _granite_hf_written(config: ModelConfig) -> Settings:
    rotates = "rope" if config.rope is not None else "nope"
    stated = {**written_types(config, LINEAR), "position_embedding_type": rotates}
    state = config.state
    if state is not None:
        inner = state.heads * state.head_dim
        stated |= {"mamba_d_head": state.head_dim, "mamba_expand": inner // config.hidden_size}
    if config.experts is None:
        stated |= {"num_local_experts": 0, "shared_intermediate_size": config.intermediate_size}
    return stated


def _granite_gguf_written(config: ModelConfig) -> Settings:
    rotates = config.rope is not None
    return {**kv_heads(config), **inner_size(config), "rope.scaling.finetuned": rotates}


def _granite_expert(name: str, shape: str, hf: str, stored: Stored) -> WeightRow:
    gguf = f"ffn_{name}_exps"
    return row(f"experts.{name}", shape, f"block_sparse_moe.{hf}", gguf, None, has_experts, stored)


# Granite 4: Mamba-2 in most layers, a plain MLP or experts with a shared expert.
GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    hf_names=("GraniteMoeHybridForCausalLM",),
    gguf_names=("granitehybrid",),
    weights=decoder(
        GGUF_PAIRED,
        _mamba2("mamba"),
        (
            *(
                row(
                    f"{part}.{name}",
                    f"{letter}D",
                    "shared_mlp.input_linear",
                    f"ffn_{name}{suffix}",
                    when=when,
                    hf_stored=Stored(2 * letter, index),
                )
                for part, letter, suffix, when in (
                    ("mlp", "F", "", is_dense),
                    ("shared", "S", "_shexp", has_shared),
                )
                for index, name in enumerate(("gate", "up"))
            ),
            row("mlp.down", "DF", "shared_mlp.output_linear", "ffn_down", when=is_dense),
            row("shared.down", "DS", "shared_mlp.output_linear", "ffn_down_shexp", when=has_shared),
            row(
                "experts.router",
                "ED",
                "block_sparse_moe.router.layer",
                "ffn_gate_inp",
                when=has_experts,
            ),
            _granite_expert("gate", "EXD", "input_linear", Stored("XX", 0)),
            _granite_expert("up", "EXD", "input_linear", Stored("XX", 1)),
            _granite_expert("down", "EDX", "output_linear", Stored()),
        ),
        input_norms(),
    ),
    hf_keys=HF_KEYS
    | ATTENTION_BIAS
    | GRANITE_HF_KEYS
    | {
        "num_local_experts": "experts.count",
        "num_experts_per_tok": "experts.per_token",
        "shared_intermediate_size": "experts.shared_size",
        "mamba_n_heads": "state.heads",
        "mamba_n_groups": "state.groups",
        "mamba_d_state": "state.state_size",
        "mamba_d_conv": "state.conv_size",
        "mamba_conv_bias": "state.conv_bias",
        "mamba_proj_bias": "state.proj_bias",
    },
    gguf_keys=HYBRID_GGUF_KEYS | GRANITE_GGUF_KEYS | GGUF_EXPERT_KEYS | GGUF_STATE,
    always={"experts.scoring": "softmax_chosen"},
    hf_defaults={
        "attention_multiplier": 1.0,
        "state.heads": 128,
        "state.groups": 1,
        "state.state_size": 256,
        "state.conv_size": 4,
        "state.conv_bias": True,
        "state.proj_bias": False,
    },
    hf_view=_granite_view,
    hf_more=_granite_from_hf,
    gguf_more=_granite_from_gguf,
    hf_written=_granite_hf_written,
    gguf_written=_granite_gguf_written,
)

_BLOCK_TYPES = {"M": LINEAR, "*": "full_attention", "-": "mlp", "E": "moe"}
_OF_BLOCK: dict[str, tuple[Mixer, bool]] = {  # the mixer of a block, and whether it is an MLP
    LINEAR: ("mamba2", False),
    "mamba": ("mamba2", False),
    "full_attention": ("attention", False),
    "attention": ("attention", False),
    "mlp": ("none", True),
}


def _nemotron_view(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reads the blocks from a pattern such as "M-M*-", which older files have."""
    pattern, listed = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if not isinstance(listed, list):
        if not isinstance(pattern, str) or not set(pattern) <= _BLOCK_TYPES.keys():
            raise ModelFormatError(
                "config.json: key 'layers_block_type' must list the blocks of the model"
            )
        listed = [_BLOCK_TYPES[each] for each in pattern]
    unknown = [each for each in listed if not isinstance(each, str) or each not in _OF_BLOCK]
    if unknown:
        raise ModelFormatError(
            f"config.json: key 'layers_block_type': blocks of type {unknown[0]} are not supported"
        )
    rest = {key: value for key, value in config.items() if key != "n_routed_experts"}
    return {**rest, "layers_block_type": listed, "num_hidden_layers": len(listed)}


def _blocks(blocks: list[tuple[Mixer, bool]]) -> Settings:
    return {"layers": tuple(LayerConfig(None, None, False, *each) for each in blocks)}


def _nemotron_from_hf(reader: Reader, found: Settings) -> Settings:
    _check_time_steps(reader)
    state = replace(found["state"], norm_groups=max(1, found["state"].groups))
    listed: list[str] = reader.read(list, "layers_block_type")
    return {"state": state, **_blocks([_OF_BLOCK[each] for each in listed])}


def _nemotron_from_gguf(reader: Reader, found: Settings) -> Settings:
    """The length of an MLP is a list, with 0 for other blocks."""
    state = with_head_dim(reader, found["state"])
    settings = gguf_mixers(reader, found, "mamba2")
    key = f"{reader.read(str, 'general.architecture')}.feed_forward_length"
    listed, count = reader.source.get(key), found["num_layers"]
    sizes = listed.tolist() if isinstance(listed, np.ndarray) else listed
    if not isinstance(sizes, list) or len(sizes) < count:
        raise ModelFormatError(f"GGUF metadata: key '{key}' must be a list of {count} numbers")
    size = next((each for each in sizes if each), 1)
    if type(size) is not int or any(each not in (0, size) for each in sizes[:count]):
        raise ModelFormatError(f"GGUF metadata: key '{key}': all MLPs must have one size")
    blocks: list[tuple[Mixer, bool]] = [
        ("none", True) if length else (layer.mixer, False)
        for layer, length in zip(settings["layers"], sizes, strict=False)
    ]
    return {
        **settings,
        "intermediate_size": size,
        "state": replace(state, norm_groups=max(1, state.groups)),
        **_blocks(blocks),
    }


def _nemotron_hf_written(config: ModelConfig) -> Settings:
    names = {"mamba2": LINEAR, "attention": "full_attention", "none": "mlp"}
    layers = (config.layer(index) for index in range(config.num_layers))
    return {"layers_block_type": [names[each.mixer] for each in layers]}


def _nemotron_gguf_written(config: ModelConfig) -> Settings:
    layers = (config.layer(index) for index in range(config.num_layers))
    sizes = [config.intermediate_size if each.mlp else 0 for each in layers]
    lists = {"feed_forward_length": np.array(sizes, np.int32)}
    return {**kv_heads(config), **inner_size(config), **lists}


# Nemotron-H: a layer is a Mamba-2 block, attention without rotation, or an MLP.
NEMOTRON_H = Family(
    name="nemotron_h",
    hf_names=("NemotronHForCausalLM",),
    gguf_names=("nemotron_h",),
    weights=renamed(
        decoder(
            (
                row("attn_norm", "D", "norm", "attn_norm", when=has_mixer),
                row("mlp_norm", "D", "norm", "attn_norm", when=is_dense),
                *attention(),
                row("mlp.up", "FD", "mixer.up_proj", "ffn_up", "mlp_bias", is_dense),
                row("mlp.down", "DF", "mixer.down_proj", "ffn_down", "mlp_bias", is_dense),
            ),
            _mamba2("mixer"),
            norm=("backbone.norm_f.weight", "output_norm.weight"),
        ),
        {
            "model.embed_tokens": "backbone.embeddings",
            "model.layers": "backbone.layers",
            "self_attn": "mixer",
        },
    ),
    hf_keys=layer_keys("layer_norm_epsilon")
    | ATTENTION_BIAS
    | MLP_BIAS
    | {
        "mamba_num_heads": "state.heads",
        "mamba_head_dim": "state.head_dim",
        "n_groups": "state.groups",
        "ssm_state_size": "state.state_size",
        "conv_kernel": "state.conv_size",
        "use_conv_bias": "state.conv_bias",
    },
    gguf_keys={key: name for key, name in HYBRID_GGUF_KEYS.items() if key != "feed_forward_length"}
    | GGUF_STATE,
    hf_activation=("mlp_hidden_act", "relu2"),
    always={"rope": None, "gated_mlp": False},
    hf_defaults={"state.conv_bias": True},
    hf_refused={"use_bias": True, "mamba_proj_bias": True},
    hf_view=_nemotron_view,
    hf_more=_nemotron_from_hf,
    gguf_more=_nemotron_from_gguf,
    hf_written=_nemotron_hf_written,
    gguf_written=_nemotron_gguf_written,
)
