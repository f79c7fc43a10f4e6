"""Families with layer norms: GPT-2, GPT-NeoX, MPT, StarCoder2, StableLM, Nemotron and Cohere."""

from collections.abc import Mapping
from typing import Any

from engine.architectures.base import Reader
from engine.architectures.common import (
    ATTENTION_BIAS,
    BOTH_PAIRED,
    GATED_MLP,
    GGUF_LAYER_NORM_KEYS,
    MLP_BIAS,
    attention,
    decoder,
    input_norms,
    layer_keys,
    norm,
    plain_mlp,
)
from engine.architectures.family import Family, More, Settings
from engine.architectures.foreign import ANY
from engine.architectures.layers import alternating
from engine.architectures.weight_rows import Stored, WeightRow, has_head
from engine.core.errors import ModelFormatError


def _parallel(kind: str) -> tuple[More, More]:
    """Functions that read whether attention and MLP run in parallel. `kind`: see
    `ModelConfig.parallel`.
    """

    def from_hf(reader: Reader, found: Settings) -> Settings:
        default = kind == "own"  # as in Transformers: GPT-NeoX and StableLM differ
        is_on = reader.read(bool, "use_parallel_residual", default=default)
        return {"parallel": kind if is_on else None}

    def from_gguf(reader: Reader, found: Settings) -> Settings:
        key = f"{reader.read(str, 'general.architecture')}.use_parallel_residual"
        return {"parallel": kind if reader.read(bool, key, default=True) else None}

    return from_hf, from_gguf


def _window(reader: Reader, found: Settings) -> Settings:
    return {"sliding_window": reader.read(int, "sliding_window", default=None)}


STARCODER2 = Family(
    name="starcoder2",
    hf_names=("Starcoder2ForCausalLM",),
    gguf_names=("starcoder2",),
    weights=decoder(attention(), plain_mlp("mlp.c_fc", "mlp.c_proj"), input_norms()),
    hf_keys=layer_keys("norm_epsilon") | {"use_bias": ("qkv_bias", "out_bias", "mlp_bias")},
    gguf_keys=GGUF_LAYER_NORM_KEYS,
    hf_activation=("hidden_act", "gelu_pytorch_tanh"),
    always={"norm": "layer", "norm_bias": True, "gated_mlp": False},
    defaults={"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    hf_defaults={"tie_embeddings": True, "norm_eps": 1e-5},
    hf_more=_window,
)
_STABLELM = _parallel("shared")
# StableLM 2 and 3B: a quarter of each head is rotated.
STABLELM = Family(
    name="stablelm",
    hf_names=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    gguf_names=("stablelm",),
    weights=decoder(attention(), GATED_MLP, input_norms()),
    hf_keys=layer_keys("layer_norm_eps") | {"use_qkv_bias": "qkv_bias"},
    gguf_keys=GGUF_LAYER_NORM_KEYS,
    always={"norm": "layer", "norm_bias": True},
    hf_defaults={"norm_eps": 1e-5},
    hf_refused={"qk_layernorm": ANY},
    hf_more=_STABLELM[0],
    gguf_more=_STABLELM[1],
    rotated=0.25,
)
# Nemotron and Minitron: Hugging Face stores norm weights minus one.
NEMOTRON = Family(
    name="nemotron",
    hf_names=("NemotronForCausalLM",),
    gguf_names=("nemotron",),
    weights=decoder(
        attention(), plain_mlp("mlp.up_proj", "mlp.down_proj"), input_norms(1.0), added=1.0
    ),
    hf_keys=layer_keys("norm_eps") | ATTENTION_BIAS | MLP_BIAS,
    gguf_keys=GGUF_LAYER_NORM_KEYS,
    hf_activation=("hidden_act", "relu2"),
    always={"norm": "layer", "norm_bias": True, "gated_mlp": False},
    hf_defaults={"norm_eps": 1e-5},
    rotated=0.5,
)


def _rows(
    hf: str, names: Mapping[str, str], qkv: Stored, gguf_qkv: Stored
) -> tuple[WeightRow, ...]:
    """The weights of GPT-NeoX and MPT. `hf` is the prefix of a layer; `names` has Hugging Face's
    name of each part. Both formats store q, k and v as one matrix.
    """

    def weight(name: str, shape: str, theirs: str, gguf: str, bias: str) -> WeightRow:
        hf_name = f"{hf}.{theirs}.weight"
        return WeightRow(
            f"layers.{{i}}.{name}.weight", shape, hf_name, f"blk.{{i}}.{gguf}.weight", bias
        )

    fused = [
        WeightRow(
            f"layers.{{i}}.attn.{part}.weight",
            "DD",
            f"{hf}.{names['qkv']}.weight",
            "blk.{i}.attn_qkv.weight",
            "qkv_bias",
            hf_stored=Stored(qkv.parts, index, qkv.groups),
            gguf_stored=Stored(gguf_qkv.parts, index),
        )
        for index, part in enumerate("qkv")
    ]
    return (
        *fused,
        weight("attn.o", "DD", names["o"], "attn_output", "out_bias"),
        weight("mlp.up", "FD", names["up"], "ffn_up", "mlp_bias"),
        weight("mlp.down", "DF", names["down"], "ffn_down", "mlp_bias"),
        weight("attn_norm", "D", names["attn_norm"], "attn_norm", "norm_bias"),
        weight("mlp_norm", "D", names["mlp_norm"], "ffn_norm", "norm_bias"),
    )


def _ends(embed: str, norm: str, head: str) -> tuple[WeightRow, WeightRow, WeightRow]:
    return (
        WeightRow("embed.weight", "VD", f"{embed}.weight", "token_embd.weight"),
        WeightRow("norm.weight", "D", f"{norm}.weight", "output_norm.weight", "norm_bias"),
        WeightRow("head.weight", "VD", f"{head}.weight", "output.weight", when=has_head),
    )


def _neox_view(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Older files name the rotated part and the base of RoPE in their own way."""
    names = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    return {**{names[key]: config[key] for key in names if key in config}, **config}


_NEOX_EMBED, *_NEOX_LAST = _ends("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out")
_NEOX = _parallel("own")
# GPT-NeoX and Pythia. The file has, for each head, its rows of q, k and v.
GPT_NEOX = Family(
    name="gpt_neox",
    hf_names=("GPTNeoXForCausalLM",),
    gguf_names=("gptneox",),
    weights=(
        _NEOX_EMBED,
        *_rows(
            "gpt_neox.layers.{i}",
            {
                "qkv": "attention.query_key_value",
                "o": "attention.dense",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
                "attn_norm": "input_layernorm",
                "mlp_norm": "post_attention_layernorm",
            },
            qkv=Stored("HHH", groups="N"),
            gguf_qkv=Stored("DDD"),
        ),
        *_NEOX_LAST,
    ),
    hf_keys={
        key: name
        for key, name in layer_keys("layer_norm_eps").items()
        if key not in ("num_key_value_heads", "head_dim")
    }
    | ATTENTION_BIAS,
    gguf_keys=GGUF_LAYER_NORM_KEYS,
    hf_activation=("hidden_act", "gelu"),
    always={"norm": "layer", "norm_bias": True, "mlp_bias": True, "gated_mlp": False},
    hf_defaults={"qkv_bias": True, "out_bias": True, "norm_eps": 1e-5},
    hf_more=_NEOX[0],
    gguf_more=_NEOX[1],
    rotated=0.25,
    hf_view=_neox_view,
)


def _mpt_view(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Puts the keys of `attn_config` beside the others."""
    attn = config.get("attn_config")
    return {**(attn if isinstance(attn, dict) else {}), **config}


def _mpt_from_hf(reader: Reader, found: Settings) -> Settings:
    if not reader.read(bool, "alibi", default=True):
        raise ModelFormatError("config.json: key 'alibi': False is not supported")
    ratio = reader.read(int, "expansion_ratio", default=4)
    scale = reader.read(float, "softmax_scale", default=None)
    return {"intermediate_size": ratio * found["hidden_size"], "attention_multiplier": scale}


def _mpt_from_gguf(reader: Reader, found: Settings) -> Settings:
    if reader.read(float, "mpt.attention.clamp_kqv", default=0.0):
        raise ModelFormatError("GGUF metadata: key 'mpt.attention.clamp_kqv' is not supported")
    return {}


_MPT_EMBED, *_MPT_LAST = _ends("transformer.wte", "transformer.norm_f", "lm_head")
# MPT: ALiBi instead of RoPE, and no biases.
MPT = Family(
    name="mpt",
    hf_names=("MptForCausalLM", "MPTForCausalLM"),
    gguf_names=("mpt",),
    weights=(
        _MPT_EMBED,
        *_rows(
            "transformer.blocks.{i}",
            {
                "qkv": "attn.Wqkv",
                "o": "attn.out_proj",
                "up": "ffn.up_proj",
                "down": "ffn.down_proj",
                "attn_norm": "norm_1",
                "mlp_norm": "norm_2",
            },
            qkv=Stored("DDD"),
            gguf_qkv=Stored("DDD"),
        ),
        *_MPT_LAST,
    ),
    hf_keys={
        "vocab_size": "vocab_size",
        "d_model": "hidden_size",
        "n_layers": "num_layers",
        "n_heads": "num_heads",
        "max_seq_len": "max_position",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
        "alibi_bias_max": "alibi_bias",
    },
    gguf_keys=GGUF_LAYER_NORM_KEYS | {"attention.max_alibi_bias": "alibi_bias"},
    hf_activation=("hidden_act", "gelu"),
    always={"norm": "layer", "rope": None, "gated_mlp": False},
    defaults={"alibi_bias": 8.0, "norm_eps": 1e-5},
    hf_defaults={"tie_embeddings": True, "intermediate_size": 0},
    hf_refused={
        "clip_qkv": ANY,
        "qk_ln": ANY,
        "prefix_lm": ANY,
        "attn_uses_sequence_id": ANY,
        "logit_scale": ANY,
        "no_bias": False,
        "kv_n_heads": ANY,
    },
    hf_view=_mpt_view,
    hf_more=_mpt_from_hf,
    gguf_more=_mpt_from_gguf,
)

# In Cohere's Command models, attention and MLP read the same normalized input, norms have no bias,
# and both formats interleave rotary pairs.
_COHERE_WEIGHTS = decoder(
    BOTH_PAIRED, GATED_MLP, (norm("attn_norm", "input_layernorm", "attn_norm"),)
)
_COHERE_HF_KEYS = (
    layer_keys("layer_norm_eps") | ATTENTION_BIAS | {"logit_scale": "1/logits_scaling"}
)
_COHERE_GGUF_KEYS = GGUF_LAYER_NORM_KEYS | {"logit_scale": "1/logits_scaling"}
# Command-R, Command-R+ and Aya, if they have no norms of queries and keys.
COHERE = Family(
    name="cohere",
    hf_names=("CohereForCausalLM",),
    gguf_names=("command-r",),
    weights=_COHERE_WEIGHTS,
    hf_keys=_COHERE_HF_KEYS,
    gguf_keys=_COHERE_GGUF_KEYS,
    always={"norm": "layer", "parallel": "shared"},
    hf_defaults={"tie_embeddings": True, "logits_scaling": 16.0, "norm_eps": 1e-5},
    hf_refused={"use_qk_norm": ANY},
    theta=500_000.0,
)
_COHERE2_LAYERS = alternating(4, window=4096, rotates_global=False)
# Command-R7B and Command-A: most layers have a window, and only these rotate queries and keys.
COHERE2 = Family(
    name="cohere2",
    hf_names=("Cohere2ForCausalLM",),
    gguf_names=("cohere2",),
    weights=_COHERE_WEIGHTS,
    hf_keys=_COHERE_HF_KEYS,
    gguf_keys=_COHERE_GGUF_KEYS,
    always={"norm": "layer", "parallel": "shared"},
    hf_defaults={"tie_embeddings": True, "logits_scaling": 16.0, "norm_eps": 1e-5},
    hf_refused={"use_qk_norm": ANY},
    hf_more=_COHERE2_LAYERS[0],
    gguf_more=_COHERE2_LAYERS[1],
)

# GPT-2 has learned positions. Hugging Face checkpoints store its projection matrices as (in, out).
_GPT2_L, _GPT2_HF, _GPT2_B = "layers.{i}", "transformer.h.{i}", "blk.{i}"


def _gpt2_norm(name: str, hf: str, gguf: str) -> WeightRow:
    return WeightRow(f"{name}.weight", "D", f"{hf}.weight", f"{gguf}.weight", bias="norm_bias")


def _gpt2_linear(name: str, shape: str, hf: str, gguf: str, bias: str) -> WeightRow:
    return WeightRow(
        f"{_GPT2_L}.{name}.weight",
        shape,
        f"{_GPT2_HF}.{hf}.weight",
        f"{_GPT2_B}.{gguf}.weight",
        bias=bias,
        hf_stored=Stored(transposed=True),
    )


def _gpt2_qkv(index: int) -> WeightRow:
    """The row of q, k or v, which the file stores as one matrix."""
    return WeightRow(
        f"{_GPT2_L}.attn.{'qkv'[index]}.weight",
        "DD",
        f"{_GPT2_HF}.attn.c_attn.weight",
        f"{_GPT2_B}.attn_qkv.weight",
        bias="qkv_bias",
        hf_stored=Stored("DDD", index, transposed=True),
        gguf_stored=Stored("DDD", index),
    )


GPT2 = Family(
    name="gpt2",
    hf_names=("GPT2LMHeadModel",),
    gguf_names=("gpt2",),
    weights=(
        WeightRow("embed.weight", "VD", "transformer.wte.weight", "token_embd.weight"),
        WeightRow("position.weight", "PD", "transformer.wpe.weight", "position_embd.weight"),
        _gpt2_norm(f"{_GPT2_L}.attn_norm", f"{_GPT2_HF}.ln_1", f"{_GPT2_B}.attn_norm"),
        _gpt2_norm(f"{_GPT2_L}.mlp_norm", f"{_GPT2_HF}.ln_2", f"{_GPT2_B}.ffn_norm"),
        *(_gpt2_qkv(index) for index in range(3)),
        _gpt2_linear("attn.o", "Dq", "attn.c_proj", "attn_output", "out_bias"),
        _gpt2_linear("mlp.up", "FD", "mlp.c_fc", "ffn_up", "mlp_bias"),
        _gpt2_linear("mlp.down", "DF", "mlp.c_proj", "ffn_down", "mlp_bias"),
        _gpt2_norm("norm", "transformer.ln_f", "output_norm"),
        WeightRow("head.weight", "VD", "lm_head.weight", "output.weight", when=has_head),
    ),
    hf_keys={
        "vocab_size": "vocab_size",
        "n_embd": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    },
    gguf_keys={
        "vocab_size": "vocab_size",
        "embedding_length": "hidden_size",
        "block_count": "num_layers",
        "attention.head_count": "num_heads",
        "feed_forward_length": "intermediate_size",
        "context_length": "max_position",
        "attention.layer_norm_epsilon": "norm_eps",
    },
    hf_activation=("activation_function", "gelu_new"),
    always={
        "rope": None,
        "norm": "layer",
        "norm_bias": True,
        "gated_mlp": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    },
    hf_defaults={
        "intermediate_size": lambda found: 4 * found["hidden_size"],
        "tie_embeddings": True,
    },
    hf_refused={
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "add_cross_attention": True,
    },
)
