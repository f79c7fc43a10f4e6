"""Hybrids: models in which most layers keep a state of fixed size instead of keys and values. This
module has what hybrids share, and LFM2, which has short convolutions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine.architectures.base import (
    MAX_LAYERS,
    LayerConfig,
    ModelConfig,
    Reader,
)
from engine.architectures.common import (
    GGUF_KEYS,
    attends,
    attention,
    decoder,
    is_dense,
    layer_keys,
    row,
)
from engine.architectures.family import Family, Keys, Settings
from engine.architectures.hybrids.states import STATE_MIXERS, Mixer, StateConfig
from engine.architectures.weight_rows import Stored, WeightRow
from engine.core.errors import ModelFormatError

LINEAR, _ATTENTION = "linear_attention", "full_attention"
_LEGACY = {"mamba": LINEAR, "attention": _ATTENTION}  # what older files call them
_KV_HEADS = "attention.head_count_kv"
# In GGUF files of hybrids, the number of KV heads is a list, with 0 for layers without attention.
HYBRID_GGUF_KEYS: Keys = {key: name for key, name in GGUF_KEYS.items() if key != _KV_HEADS}


GGUF_STATE: Keys = {
    "ssm.conv_kernel": "state.conv_size",
    "ssm.state_size": "state.state_size",
    "ssm.group_count": "state.groups",
    "ssm.time_step_rank": "state.heads",
}


def has_state(config: ModelConfig, layer: int) -> bool:
    return config.layer(layer).mixer in STATE_MIXERS


def layer_mixers(reader: Reader, count: int, kinds: Mapping[str, Mixer]) -> list[Mixer]:
    """The mixer of each layer of a config.json. `kinds` has the mixers by their names there."""
    stated: list[Any] = reader.read(list, "layer_types")
    listed = [_LEGACY.get(each, each) if isinstance(each, str) else None for each in stated]
    known: dict[Any, Mixer] = {**kinds, _ATTENTION: "attention"}
    if len(listed) < count or not all(each in known for each in listed):
        raise ModelFormatError(
            f"config.json: key 'layer_types' must have one of {', '.join(known)} for each of the "
            f"{count} layers"
        )
    return [known[each] for each in listed[:count]]


def layers_of(found: Settings, mixers: list[Mixer]) -> Settings:
    has_experts = found["experts"] is not None
    return {"layers": tuple(LayerConfig(None, found["rope"], has_experts, each) for each in mixers)}


def gguf_mixers(reader: Reader, found: Settings, mixer: Mixer) -> Settings:
    """The number of KV heads and the mixers of the layers of a GGUF file. Layers without KV heads
    have `mixer`.
    """
    key = f"{reader.read(str, 'general.architecture')}.{_KV_HEADS}"
    count, listed = found["num_layers"], reader.source.get(key)
    heads = listed.tolist() if isinstance(listed, np.ndarray) else listed
    if not isinstance(heads, list) or len(heads) < count:
        raise ModelFormatError(f"GGUF metadata: key '{key}' must be a list of {count} numbers")
    sizes = {each for each in heads[:count] if each}
    if len(sizes) != 1 or not all(type(each) is int for each in heads):
        raise ModelFormatError(
            f"GGUF metadata: key '{key}': all layers with attention must have the same number of "
            "KV heads"
        )
    mixers: list[Mixer] = ["attention" if each else mixer for each in heads[:count]]
    return {"num_kv_heads": sizes.pop(), **layers_of(found, mixers)}


def kv_heads(config: ModelConfig) -> Settings:
    layers = (config.layer(index) for index in range(config.num_layers))
    heads = [config.num_kv_heads if each.mixer == "attention" else 0 for each in layers]
    return {_KV_HEADS: np.array(heads, np.int32)}


def written_types(config: ModelConfig, name: str) -> Settings:
    """The key `layer_types` of a config.json. `name` is that of layers with a state."""
    mixers = (config.layer(index).mixer for index in range(config.num_layers))
    return {"layer_types": [_ATTENTION if each == "attention" else name for each in mixers]}


def mixer_row(name: str, shape: str, hf: str, gguf: str, bias: str | None = None) -> WeightRow:
    return row(f"mixer.{name}", shape, hf, gguf, bias, has_state)


def conv_row(hf: str, gguf: str) -> WeightRow:
    stored = Stored(shape="C1L")
    return row("mixer.conv", "CL", hf, gguf, "state.conv_bias", has_state, stored)


def vector_row(
    name: str, shape: str, hf: str, gguf: str, in_hf: Stored, in_gguf: Stored
) -> WeightRow:
    """A vector of a layer with a state. In files, its name lacks the usual ".weight"."""
    hf, gguf = f"model.layers.{{i}}.{hf}", f"blk.{{i}}.{gguf}"
    ours = f"layers.{{i}}.mixer.{name}"
    return WeightRow(ours, shape, hf, gguf, None, has_state, in_hf, in_gguf)


def with_head_dim(reader: Reader, state: StateConfig) -> StateConfig:
    """The state settings of a GGUF file, completed by the size of its heads."""
    prefix = reader.read(str, "general.architecture")
    inner = reader.read(int, f"{prefix}.ssm.inner_size")
    if state.heads < 1 or inner < 1 or inner % state.heads:
        raise ModelFormatError(
            f"GGUF metadata: key '{prefix}.ssm.inner_size' must be a multiple of the number of "
            f"heads ({state.heads})"
        )
    return replace(state, head_dim=inner // state.heads)


def inner_size(config: ModelConfig) -> Settings:
    state = config.state
    return {} if state is None else {"ssm.inner_size": state.heads * state.head_dim}


def _lfm2_view(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Computes the MLP's size, which a config.json may state before it is rounded, and the types of
    the layers from the list of those with attention.
    """
    reader = Reader(config, "config.json")
    changes: dict[str, Any] = {}
    size = reader.read(int, "intermediate_size", default=12288)
    size = reader.read(int, "block_ff_dim", default=size)
    if reader.read(bool, "block_auto_adjust_ff_dim", default=True):
        factor = reader.read(float, "block_ffn_dim_multiplier", default=1.0)
        multiple = reader.read(int, "block_multiple_of", default=256)
        if multiple < 1 or not 0 < size < 2**40 or not 0 < factor < 2**20:
            raise ModelFormatError(
                "config.json: keys 'intermediate_size', 'block_ffn_dim_multiplier' and "
                "'block_multiple_of' must be above 0"
            )
        size = -(-int(factor * int(2 * size / 3)) // multiple) * multiple
    if config.get("layer_types") is None:
        count = reader.read(int, "num_hidden_layers")
        listed: list[Any] = reader.read(list, "full_attn_idxs", default=[])
        if 0 < count <= MAX_LAYERS and listed:
            kinds = (_ATTENTION if i in listed else "conv" for i in range(count))
            changes["layer_types"] = list(kinds)
    return {**config, **changes, "intermediate_size": size}


def _lfm2_from_hf(reader: Reader, found: Settings) -> Settings:
    return layers_of(found, layer_mixers(reader, found["num_layers"], {"conv": "conv"}))


def _lfm2_from_gguf(reader: Reader, found: Settings) -> Settings:
    return gguf_mixers(reader, found, "conv")


def _lfm2_written(config: ModelConfig) -> Settings:
    return {**written_types(config, "conv"), "block_auto_adjust_ff_dim": False}


_LFM2_MLP = (
    row("mlp.gate", "FD", "feed_forward.w1", "ffn_gate", when=is_dense),
    row("mlp.up", "FD", "feed_forward.w3", "ffn_up", when=is_dense),
    row("mlp.down", "DF", "feed_forward.w2", "ffn_down", when=is_dense),
)
# LFM2: most layers have a short convolution between two gates instead of attention. The final norm
# is called the norm of the embeddings.
LFM2 = Family(
    name="lfm2",
    hf_names=("Lfm2ForCausalLM",),
    gguf_names=("lfm2",),
    weights=decoder(
        (
            row("attn_norm", "D", "operator_norm", "attn_norm"),
            row("mlp_norm", "D", "ffn_norm", "ffn_norm"),
            *attention()[:3],
            row("attn.o", "Dq", "self_attn.out_proj", "attn_output", when=attends),
            row("attn.q_norm", "H", "self_attn.q_layernorm", "attn_q_norm", when=attends),
            row("attn.k_norm", "H", "self_attn.k_layernorm", "attn_k_norm", when=attends),
            conv_row("conv.conv", "shortconv.conv"),
            mixer_row("in", "JD", "conv.in_proj", "shortconv.in_proj", "state.proj_bias"),
            mixer_row("o", "DI", "conv.out_proj", "shortconv.out_proj", "state.proj_bias"),
        ),
        _LFM2_MLP,
        norm=("model.embedding_norm.weight", "token_embd_norm.weight"),
    ),
    hf_keys=layer_keys("norm_eps")
    | {"tie_embedding": "tie_embeddings", "conv_L_cache": "state.conv_size"}
    | {"conv_bias": ("state.conv_bias", "state.proj_bias")},
    gguf_keys=HYBRID_GGUF_KEYS | {"shortconv.l_cache": "state.conv_size"},
    always={"qk_norm": "head"},
    hf_defaults={"tie_embeddings": True, "state.conv_size": 3, "state.conv_bias": False},
    theta=1_000_000.0,
    hf_view=_lfm2_view,
    hf_more=_lfm2_from_hf,
    gguf_more=_lfm2_from_gguf,
    hf_written=_lfm2_written,
    gguf_written=kv_heads,
)
