"""Llama and its descendants. All of these families have RMS norms, RoPE and a gated MLP. Each
`Family` below states where it differs from Llama.
"""

from math import sqrt

from engine.architectures.base import LayerConfig, ModelConfig, Reader
from engine.architectures.common import (
    ATTENTION_BIAS,
    BOTH_PAIRED,
    GATED_MLP,
    GGUF_EXPERT_KEYS,
    GGUF_KEYS,
    GGUF_PAIRED,
    HF_KEYS,
    MLP_BIAS,
    OUTPUT_NORMS,
    attention,
    decoder,
    experts,
    head_norms,
    input_norms,
    renamed,
)
from engine.architectures.family import REQUIRED, Family, Keys, Settings
from engine.architectures.foreign import ANY, text_config
from engine.architectures.layers import (
    alternating,
    layer_settings,
    local_layers,
    qwen_window,
    smollm3_layers,
)
from engine.architectures.weight_rows import Stored, WeightRow
from engine.core.errors import ModelFormatError

# The sliding window of a Mistral config that lacks the key "sliding_window". Transformers has the
# same default. If the key is there with the value null, the model has no window.
_MISTRAL_WINDOW = 4096


def _mistral_window(reader: Reader, found: Settings) -> Settings:
    kind = reader.read(str, "model_type", default=None)
    if kind not in ("mistral", "mixtral", "ministral"):
        return {}
    window = reader.read(int, "sliding_window", default=None)
    if not reader.has("sliding_window") and kind != "mixtral":
        window = _MISTRAL_WINDOW
    if kind != "ministral" or window is None:
        return {"sliding_window": window}
    local = local_layers(reader, found["num_layers"], period=0)
    kinds = [LayerConfig(window if each else None, found["rope"], False) for each in local]
    return layer_settings(found, kinds)


def _whole_rotation(reader: Reader, found: Settings) -> Settings:
    """Rejects GGUF models in which RoPE rotates only a part of each head. Converters permute the
    rows of a head as if the whole head were rotated. The loader can undo this only if it is.
    """
    prefix, size = reader.read(str, "general.architecture"), found["head_dim"]
    if found["rope"].dim != size:
        raise ModelFormatError(
            f"GGUF metadata: key '{prefix}.rope.dimension_count' must equal the head size "
            f"({size}): partial rotation is not supported"
        )
    return {}


def _llama_from_gguf(reader: Reader, found: Settings) -> Settings:
    """Rejects scores that are scaled by their position, as in Ministral 3."""
    prefix = reader.read(str, "general.architecture")
    for key in ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"):
        if reader.read(float, f"{prefix}.{key}", default=0.0):
            raise ModelFormatError(f"GGUF metadata: key '{prefix}.{key}' is not supported")
    return _whole_rotation(reader, found)


def _granite_rotation(reader: Reader, found: Settings) -> Settings:
    """Rejects GGUF files whose `rope.scaling.finetuned` is false. In Granite files, this means that
    the model does not use RoPE.
    """
    key = f"{reader.read(str, 'general.architecture')}.rope.scaling.finetuned"
    if not reader.read(bool, key, default=True):
        raise ModelFormatError(
            f"GGUF metadata: key '{key}': attention without rotation is not supported"
        )
    return _whole_rotation(reader, found)


def _llama_kind(config: ModelConfig) -> tuple[str, str]:
    if config.experts is not None:
        return "MixtralForCausalLM", "mixtral"
    if config.layers:
        return "MinistralForCausalLM", "ministral"
    if config.sliding_window is not None:
        return "MistralForCausalLM", "mistral"
    return "LlamaForCausalLM", "llama"


# Llama 1 to 3, Mistral, Mixtral, Falcon 3, SmolLM, InternLM 3 and other models whose files name the
# Llama architecture.
LLAMA = Family(
    name="llama",
    hf_names=(
        "LlamaForCausalLM",
        "LLaMAForCausalLM",
        "MistralForCausalLM",
        "MinistralForCausalLM",
        "MixtralForCausalLM",
        "InternLM3ForCausalLM",
        "Mistral3ForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
    ),
    gguf_names=("llama", "mistral3"),
    weights=decoder(
        GGUF_PAIRED,
        GATED_MLP,
        experts("block_sparse_moe", "gate", "w1", "w3", "w2"),
        input_norms(),
        factors=True,
    ),
    hf_keys=HF_KEYS
    | ATTENTION_BIAS
    | MLP_BIAS
    | {"qkv_bias": "qkv_bias", "bias": ("out_bias", "mlp_bias")}  # InternLM 3
    | {"num_local_experts": "experts.count", "num_experts_per_tok": "experts.per_token"},
    gguf_keys=GGUF_KEYS | GGUF_EXPERT_KEYS,
    always={"experts.renormalizes": True},
    hf_more=_mistral_window,
    gguf_more=_llama_from_gguf,
    hf_kind=_llama_kind,
    hf_view=text_config,
)
# Qwen2 and Qwen2.5: the projections of queries, keys and values have biases.
QWEN2 = Family(
    name="qwen2",
    hf_names=("Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
    gguf_names=("qwen2",),
    weights=decoder(attention(), GATED_MLP, input_norms()),
    hf_keys=HF_KEYS,
    gguf_keys=GGUF_KEYS,
    always={"qkv_bias": True},
    hf_more=qwen_window,
    hf_view=text_config,
    hf_kind=lambda config: ("Qwen2ForCausalLM", "qwen2"),
)
# Qwen3, dense models: each query and key head has a norm. The config must state the head size.
QWEN3 = Family(
    name="qwen3",
    hf_names=("Qwen3ForCausalLM",),
    gguf_names=("qwen3",),
    weights=decoder(attention(), GATED_MLP, input_norms(), head_norms("H", "H")),
    hf_keys=HF_KEYS | ATTENTION_BIAS,
    gguf_keys=GGUF_KEYS,
    always={"qk_norm": "head"},
    defaults={"head_dim": REQUIRED},
    hf_more=qwen_window,
)
GRANITE_HF_KEYS: Keys = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "attention_multiplier",
    "logits_scaling": "logits_scaling",
}
GRANITE_GGUF_KEYS: Keys = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
# Granite 3: Llama with multipliers for embeddings, residuals, attention and logits.
GRANITE = Family(
    name="granite",
    hf_names=("GraniteForCausalLM",),
    gguf_names=("granite",),
    weights=decoder(GGUF_PAIRED, GATED_MLP, input_norms(), factors=True),
    hf_keys=HF_KEYS | ATTENTION_BIAS | MLP_BIAS | GRANITE_HF_KEYS,
    gguf_keys=GGUF_KEYS | GRANITE_GGUF_KEYS,
    hf_defaults={"attention_multiplier": 1.0},
    gguf_more=_granite_rotation,
)


def _minicpm(reader: Reader, found: Settings) -> Settings:
    hidden, layers = found["hidden_size"], found["num_layers"]
    base = reader.read(float, "dim_model_base", default=1.0)
    depth = reader.read(float, "scale_depth", default=1.0)
    if base <= 0:
        raise ModelFormatError("config.json: key 'dim_model_base' must be above 0")
    return {"residual_multiplier": depth / sqrt(layers), "logits_scaling": hidden / base}


# MiniCPM 1, 2 and 4: Llama with multipliers that depend on width and depth.
MINICPM = Family(
    name="minicpm",
    hf_names=("MiniCPMForCausalLM",),
    gguf_names=("minicpm",),
    weights=decoder(GGUF_PAIRED, GATED_MLP, input_norms(), factors=True),
    hf_keys=HF_KEYS | ATTENTION_BIAS | {"scale_emb": "embedding_multiplier"},
    gguf_keys=GGUF_KEYS
    | {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    # A GGUF file must state the multipliers.
    defaults={
        "embedding_multiplier": REQUIRED,
        "residual_multiplier": REQUIRED,
        "logits_scaling": REQUIRED,
    },
    hf_defaults={
        "tie_embeddings": True,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    hf_refused={"num_experts": ANY, "sparse_config": ANY},
    hf_more=_minicpm,
    gguf_more=_whole_rotation,
)
# SmolLM3: some layers do not rotate queries and keys.
SMOLLM3 = Family(
    name="smollm3",
    hf_names=("SmolLM3ForCausalLM",),
    gguf_names=("smollm3",),
    weights=decoder(GGUF_PAIRED, GATED_MLP, input_norms(), factors=True),
    hf_keys=HF_KEYS | ATTENTION_BIAS | MLP_BIAS,
    gguf_keys=GGUF_KEYS,
    hf_defaults={"tie_embeddings": True},
    hf_refused={"use_sliding_window": True},
    hf_more=smollm3_layers,
    gguf_more=smollm3_layers,
    theta=2_000_000.0,
)
_OLMO3_HF, _OLMO3_GGUF = alternating(4, window=4096, plain_local=True)


def _olmo3(reader: Reader, found: Settings) -> Settings:
    is_olmo3 = reader.read(str, "model_type", default=None) == "olmo3"
    return _OLMO3_HF(reader, found) if is_olmo3 else {}


# OLMo 2 and 3: norms apply to the outputs of attention and MLP, and to q and k over all heads
# together. In OLMo 3, most layers have a window.
OLMO2 = Family(
    name="olmo2",
    hf_names=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    gguf_names=("olmo2",),
    weights=decoder(attention(), GATED_MLP, OUTPUT_NORMS, head_norms("q", "k")),
    hf_keys=HF_KEYS | ATTENTION_BIAS,
    gguf_keys=GGUF_KEYS,
    always={"norm_placement": "output", "qk_norm": "whole"},
    hf_more=_olmo3,
    gguf_more=_OLMO3_GGUF,
    theta=500_000.0,
    has_local_rope=True,
    hf_kind=lambda config: (
        ("Olmo3ForCausalLM", "olmo3") if config.layers else ("Olmo2ForCausalLM", "olmo2")
    ),
)
_EXAONE4_HF, _EXAONE4_GGUF = alternating(4, window=4096, rotates_global=False)
# EXAONE 4: output norms, and norms of each query and key head. Layers without window do not rotate.
EXAONE4 = Family(
    name="exaone4",
    hf_names=("Exaone4ForCausalLM",),
    gguf_names=("exaone4",),
    weights=decoder(attention(), GATED_MLP, OUTPUT_NORMS, head_norms("H", "H"), factors=True),
    hf_keys=HF_KEYS,
    gguf_keys=GGUF_KEYS,
    always={"norm_placement": "output", "qk_norm": "head"},
    hf_more=_EXAONE4_HF,
    gguf_more=_EXAONE4_GGUF,
)


# EXAONE 3 and 3.5: Llama under other names.
EXAONE = Family(
    name="exaone",
    hf_names=("ExaoneForCausalLM",),
    gguf_names=("exaone",),
    weights=renamed(
        decoder(attention(), GATED_MLP, input_norms(), factors=True),
        {
            "model.embed_tokens": "transformer.wte",
            "model.layers": "transformer.h",
            "model.norm": "transformer.ln_f",
            "self_attn.o_proj": "attn.attention.out_proj",
            "self_attn": "attn.attention",
            "gate_proj": "c_fc_0",
            "up_proj": "c_fc_1",
            "down_proj": "c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        },
    ),
    hf_keys={
        {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon"}.get(
            key, key
        ): name
        for key, name in HF_KEYS.items()
    },
    gguf_keys=GGUF_KEYS,
    hf_activation=("activation_function", "silu"),
)


def _of_wqkv(index: int, size: str) -> WeightRow:
    """A row of q, k or v. The file has, for each KV head, the rows of its query heads, of the key
    head and of the value head.
    """
    part = "qkv"[index]
    return WeightRow(
        f"layers.{{i}}.attn.{part}.weight",
        f"{size}D",
        "model.layers.{i}.attention.wqkv.weight",
        f"blk.{{i}}.attn_{part}.weight",
        "qkv_bias",
        hf_stored=Stored("gHH", index, "K"),
        gguf_stored=Stored(paired=index < 2),
    )


# InternLM 2: Llama under other names, with q, k and v in one matrix.
INTERNLM2 = Family(
    name="internlm2",
    hf_names=("InternLM2ForCausalLM",),
    gguf_names=("internlm2",),
    weights=renamed(
        decoder(
            (_of_wqkv(0, "q"), _of_wqkv(1, "k"), _of_wqkv(2, "k")),
            attention()[3:],
            GATED_MLP,
            input_norms(),
        ),
        {
            "embed_tokens": "tok_embeddings",
            "lm_head": "output",
            "self_attn.o_proj": "attention.wo",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
    ),
    hf_keys=HF_KEYS | {"bias": ("qkv_bias", "out_bias")},
    gguf_keys=GGUF_KEYS,
    gguf_more=_whole_rotation,
)
# Seed-OSS: the file says which projections have biases.
SEED_OSS = Family(
    name="seed_oss",
    hf_names=("SeedOssForCausalLM",),
    gguf_names=("seed_oss",),
    weights=decoder(attention(), GATED_MLP, input_norms(mlp="post_attention_norm")),
    hf_keys=HF_KEYS | MLP_BIAS | {"attention_bias": "qkv_bias", "attention_out_bias": "out_bias"},
    gguf_keys=GGUF_KEYS,
    hf_defaults={"qkv_bias": True, "head_dim": 128},
)
# ERNIE 4.5, dense models: both formats interleave rotary pairs.
ERNIE4_5 = Family(
    name="ernie4_5",
    hf_names=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    gguf_names=("ernie4_5",),
    weights=decoder(BOTH_PAIRED, GATED_MLP, input_norms()),
    hf_keys=HF_KEYS | {"use_bias": ("qkv_bias", "out_bias", "mlp_bias")},
    gguf_keys=GGUF_KEYS,
    hf_defaults={"tie_embeddings": True, "head_dim": 128},
    theta=500_000.0,
)
