"""Mixtures of experts: Qwen, OLMoE, Granite, GLM and gpt-oss. Mixtral is in `llama.py`: GGUF files
call it "llama".
"""

from dataclasses import replace

from engine.architectures.base import LayerConfig, ModelConfig, Reader
from engine.architectures.common import (
    ATTENTION_BIAS,
    GATED_MLP,
    GGUF_EXPERT_KEYS,
    GGUF_KEYS,
    GGUF_PAIRED,
    HF_KEYS,
    attention,
    decoder,
    experts,
    has_experts,
    has_shared,
    head_norms,
    input_norms,
    row,
    shared_expert,
)
from engine.architectures.family import Family, Keys, Settings
from engine.architectures.foreign import ANY
from engine.architectures.layers import alternating, layer_settings, sparse_layers
from engine.architectures.llama import GRANITE_GGUF_KEYS, GRANITE_HF_KEYS
from engine.architectures.weight_rows import Stored, WeightRow
from engine.core.errors import ModelFormatError

BY_EXPERT = experts("mlp", "gate", "gate_proj", "up_proj", "down_proj")
_QWEN_KEYS: Keys = {
    "num_experts": "experts.count",
    "num_local_experts": "experts.count",
    "num_experts_per_tok": "experts.per_token",
    "moe_intermediate_size": "experts.size",
    "norm_topk_prob": "experts.renormalizes",
}
# Qwen1.5-MoE and Qwen2-MoE: a shared expert, whose output a sigmoid multiplies.
QWEN2_MOE = Family(
    name="qwen2_moe",
    hf_names=("Qwen2MoeForCausalLM",),
    gguf_names=("qwen2moe",),
    weights=decoder(
        attention(),
        GATED_MLP,
        BY_EXPERT,
        shared_expert("mlp.shared_expert"),
        (
            row(
                "shared.router",
                "1D",
                "mlp.shared_expert_gate",
                "ffn_gate_inp_shexp",
                when=has_shared,
            ),
        ),
        input_norms(),
    ),
    hf_keys=HF_KEYS
    | _QWEN_KEYS
    | {"shared_expert_intermediate_size": "experts.shared_size", "qkv_bias": "qkv_bias"},
    gguf_keys=GGUF_KEYS | GGUF_EXPERT_KEYS,
    always={"experts.shared_gate": True},
    hf_defaults={"qkv_bias": True},
    hf_more=sparse_layers,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    hf_names=("Qwen3MoeForCausalLM",),
    gguf_names=("qwen3moe",),
    weights=decoder(attention(), GATED_MLP, BY_EXPERT, input_norms(), head_norms("H", "H")),
    hf_keys=HF_KEYS | ATTENTION_BIAS | _QWEN_KEYS,
    gguf_keys=GGUF_KEYS | GGUF_EXPERT_KEYS,
    always={"qk_norm": "head"},
    defaults={"experts.renormalizes": True},
    hf_defaults={"experts.renormalizes": False},
    hf_more=sparse_layers,
)
OLMOE = Family(
    name="olmoe",
    hf_names=("OlmoeForCausalLM",),
    gguf_names=("olmoe",),
    weights=decoder(attention(), BY_EXPERT, input_norms(), head_norms("q", "k")),
    hf_keys=HF_KEYS
    | ATTENTION_BIAS
    | {
        "num_experts": "experts.count",
        "num_experts_per_tok": "experts.per_token",
        "norm_topk_prob": "experts.renormalizes",
    },
    gguf_keys=GGUF_KEYS | GGUF_EXPERT_KEYS,
    always={"qk_norm": "whole"},
    hf_refused={"clip_qkv": ANY},
)


def _granite_expert(name: str, shape: str, hf: str, stored: Stored) -> WeightRow:
    moe = "block_sparse_moe"
    return row(
        f"experts.{name}", shape, f"{moe}.{hf}", f"ffn_{name}_exps", None, has_experts, stored
    )


# Granite 3 MoE: a stored matrix has gate and up of all experts.
GRANITE_MOE = Family(
    name="granitemoe",
    hf_names=("GraniteMoeForCausalLM",),
    gguf_names=("granitemoe",),
    weights=decoder(
        GGUF_PAIRED,
        (
            row("experts.router", "ED", "block_sparse_moe.router.layer", "ffn_gate_inp"),
            _granite_expert("gate", "EXD", "input_linear", Stored("XX", 0)),
            _granite_expert("up", "EXD", "input_linear", Stored("XX", 1)),
            _granite_expert("down", "EDX", "output_linear", Stored()),
        ),
        input_norms(),
    ),
    hf_keys=HF_KEYS
    | ATTENTION_BIAS
    | GRANITE_HF_KEYS
    | {"num_local_experts": "experts.count", "num_experts_per_tok": "experts.per_token"},
    gguf_keys=GGUF_KEYS | GRANITE_GGUF_KEYS | GGUF_EXPERT_KEYS,
    always={"experts.scoring": "softmax_chosen"},
    hf_defaults={"attention_multiplier": 1.0},
)


def first_dense(found: Settings, count: int, num_shared: int) -> Settings:
    """The layers of a model whose first `count` layers have a plain MLP, and its experts."""
    experts = found["experts"]
    if experts is None:
        raise ModelFormatError("a model of this family needs a number of experts")
    layers = [
        LayerConfig(None, found["rope"], index >= count) for index in range(found["num_layers"])
    ]
    shared = replace(experts, shared_size=num_shared * experts.size)
    return {"experts": shared, **layer_settings(found, layers)}


def _glm_from_hf(reader: Reader, found: Settings) -> Settings:
    count = reader.read(int, "first_k_dense_replace", default=1)
    settings = first_dense(found, count, reader.read(int, "n_shared_experts", default=1))
    norms = reader.read(bool, "use_qk_norm", default=False)
    return {**settings, "qk_norm": "head" if norms else None}


def _glm_from_gguf(reader: Reader, found: Settings) -> Settings:
    prefix = reader.read(str, "general.architecture")
    # The file counts layers that predict further tokens, too. The model does not need them.
    extra = reader.read(int, f"{prefix}.nextn_predict_layers", default=0)
    layers = found["num_layers"] - extra
    if extra < 0 or layers < 1:
        raise ModelFormatError(
            f"GGUF metadata: key '{prefix}.nextn_predict_layers' is out of range"
        )
    count = reader.read(int, f"{prefix}.leading_dense_block_count", default=0)
    shared = reader.read(int, f"{prefix}.expert_shared_count", default=0)
    settings = first_dense({**found, "num_layers": layers}, count, shared)
    return {"num_layers": layers, **settings}


def _has_correction(config: ModelConfig, layer: int) -> bool:
    return has_experts(config, layer) and config.experts is not None and config.experts.correction


CORRECTION = (
    WeightRow(
        "layers.{i}.experts.correction",
        "E",
        "model.layers.{i}.mlp.gate.e_score_correction_bias",
        "blk.{i}.exp_probs_b.bias",
        when=_has_correction,
    ),
)
# GLM-4.5 and 4.6: a sigmoid scores each expert, and a learned vector corrects the choice.
GLM4_MOE = Family(
    name="glm4_moe",
    hf_names=("Glm4MoeForCausalLM",),
    gguf_names=("glm4moe",),
    weights=decoder(
        attention(),
        GATED_MLP,
        BY_EXPERT,
        CORRECTION,
        shared_expert("mlp.shared_experts"),
        input_norms(mlp="post_attention_norm"),
        head_norms("H", "H"),
    ),
    hf_keys=HF_KEYS
    | {
        "attention_bias": "qkv_bias",
        "n_routed_experts": "experts.count",
        "num_local_experts": "experts.count",
        "num_experts_per_tok": "experts.per_token",
        "moe_intermediate_size": "experts.size",
        "norm_topk_prob": "experts.renormalizes",
        "routed_scaling_factor": "experts.scale",
        "n_group": "experts.groups",
        "topk_group": "experts.groups_per_token",
    },
    gguf_keys=GGUF_KEYS
    | {key: name for key, name in GGUF_EXPERT_KEYS.items() if "shared" not in key}
    | {"expert_weights_scale": "experts.scale", "expert_weights_norm": "experts.renormalizes"},
    always={
        "experts.scoring": "sigmoid",
        "experts.correction": True,
        "experts.group_score": "best_two",
    },
    defaults={"experts.renormalizes": True},
    hf_more=_glm_from_hf,
    gguf_more=_glm_from_gguf,
    rotated=0.5,
)


def _oai_expert(name: str, shape: str, hf: str, stored: Stored) -> WeightRow:
    return WeightRow(
        f"layers.{{i}}.experts.{name}.weight",
        shape,
        f"model.layers.{{i}}.mlp.experts.{hf}",
        f"blk.{{i}}.ffn_{name}_exps.weight",
        "experts.bias",
        hf_stored=stored,
    )


_GPT_OSS_LAYERS = alternating(2, window=128)


def _gpt_oss_from_gguf(reader: Reader, found: Settings) -> Settings:
    """YaRN without rounded bounds, which GGUF metadata do not state."""
    rope = replace(found["rope"], truncate=False)
    return {"rope": rope, **_GPT_OSS_LAYERS[1](reader, {**found, "rope": rope})}


# gpt-oss: attention sinks, and experts with biases. Hugging Face stores the experts' matrices
# transposed, with the columns of gate and up by turns.
GPT_OSS = Family(
    name="gpt_oss",
    hf_names=("GptOssForCausalLM",),
    gguf_names=("gpt-oss",),
    weights=decoder(
        attention(),
        (
            WeightRow(
                "layers.{i}.attn.sinks",
                "N",
                "model.layers.{i}.self_attn.sinks",
                "blk.{i}.attn_sinks.weight",
            ),
            row("experts.router", "ED", "mlp.router", "ffn_gate_inp", "experts.router_bias"),
            _oai_expert("gate", "EXD", "gate_up_proj", Stored("11", 0, "X", transposed=True)),
            _oai_expert("up", "EXD", "gate_up_proj", Stored("11", 1, "X", transposed=True)),
            _oai_expert("down", "EDX", "down_proj", Stored(transposed=True)),
        ),
        input_norms(mlp="post_attention_norm"),
    ),
    hf_keys=HF_KEYS
    | ATTENTION_BIAS
    | {"num_local_experts": "experts.count", "num_experts_per_tok": "experts.per_token"},
    gguf_keys=GGUF_KEYS | GGUF_EXPERT_KEYS,
    always={
        "activation": "swiglu_oai",
        "attention_sinks": True,
        "experts.scoring": "softmax_chosen",
        "experts.router_bias": True,
        "experts.bias": True,
    },
    defaults={"qkv_bias": True, "out_bias": True},
    hf_more=_GPT_OSS_LAYERS[0],
    gguf_more=_gpt_oss_from_gguf,
    theta=150_000.0,
)
