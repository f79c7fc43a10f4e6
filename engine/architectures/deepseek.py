"""DeepSeek-V2 and V3, and families with the same latent attention: Kimi K2, GLM-4.7-Flash, Youtu.

All of them are "deepseek2" in GGUF files. A GGUF file has the matrices of keys and values for each
head apart. Older GGUF files have one matrix for both, as Hugging Face has.
"""

from dataclasses import replace
from typing import Any

from engine.architectures.base import (
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    Reader,
    RopeConfig,
)
from engine.architectures.common import (
    GATED_MLP,
    GGUF_EXPERT_KEYS,
    GGUF_KEYS,
    HF_KEYS,
    decoder,
    input_norms,
    row,
    shared_expert,
)
from engine.architectures.family import REQUIRED, Family, Keys, Settings
from engine.architectures.foreign import ANY
from engine.architectures.layers import layer_settings
from engine.architectures.moe import BY_EXPERT, CORRECTION
from engine.architectures.weight_rows import Stored
from engine.core.errors import ModelFormatError

_V2, _LITE = "deepseek_v2", "glm4_moe_lite"  # values of the key "model_type"
# Older GGUF files do not state the groups of experts. These are the groups of the published models
# that have any, by number of experts: DeepSeek-V2, and V3 with R1.
_KNOWN_GROUPS = {160: (8, 3), 256: (8, 4)}
_GATINGS = {1: "softmax", 2: "sigmoid"}  # values of the GGUF key "expert_gating_func"
_DENSE, _SPARSE = "dense", "sparse"


def _has_q_rank(config: ModelConfig, layer: int) -> bool:
    return config.latent is not None and config.latent.q_rank is not None


def _lacks_q_rank(config: ModelConfig, layer: int) -> bool:
    return not _has_q_rank(config, layer)


# Both formats interleave the rotary pairs. They are the last values of a head.
_QUERY, _KEY = Stored(paired=True, unpaired="M"), Stored(paired=True, unpaired="L")
_LATENT = (
    row("attn.q", "qD", "self_attn.q_proj", "attn_q", None, _lacks_q_rank, _QUERY, _QUERY),
    row("attn.q_a", "QD", "self_attn.q_a_proj", "attn_q_a", None, _has_q_rank),
    row("attn.q_a_norm", "Q", "self_attn.q_a_layernorm", "attn_q_a_norm", None, _has_q_rank),
    row("attn.q_b", "qQ", "self_attn.q_b_proj", "attn_q_b", None, _has_q_rank, _QUERY, _QUERY),
    row("attn.kv_a", "aD", "self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", None, None, _KEY, _KEY),
    row("attn.kv_norm", "L", "self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    *(
        replace(
            row(f"attn.{name}", shape, "self_attn.kv_b_proj", gguf, hf_stored=stored),
            older_gguf="blk.{i}.attn_kv_b.weight",
        )
        for name, shape, gguf, stored in (
            ("k_up", "NLM", "attn_k_b", Stored("MU", 0, turned=True, joined=True)),
            ("v_up", "NUL", "attn_v_b", Stored("MU", 1, joined=True)),
        )
    ),
    row("attn.o", "Do", "self_attn.o_proj", "attn_output"),
)
_SHARED_KEYS = ("head_dim", "num_kv_heads")  # the engine derives these fields
_HF: Keys = {
    **{key: name for key, name in HF_KEYS.items() if name not in _SHARED_KEYS},
    "num_key_value_heads": "num_heads",
    "kv_lora_rank": "latent.kv_rank",
    "q_lora_rank": "latent.q_rank",
    "qk_nope_head_dim": "latent.nope_dim",
    "qk_rope_head_dim": "latent.rope_dim",
    "v_head_dim": "latent.value_dim",
    "n_routed_experts": "experts.count",
    "num_local_experts": "experts.count",
    "num_experts_per_tok": "experts.per_token",
    "moe_intermediate_size": "experts.size",
    "norm_topk_prob": "experts.renormalizes",
    "routed_scaling_factor": "experts.scale",
    "n_group": "experts.groups",
    "topk_group": "experts.groups_per_token",
}
_GGUF: Keys = {
    **{key: name for key, name in GGUF_KEYS.items() if name not in _SHARED_KEYS},
    "attention.kv_lora_rank": "latent.kv_rank",
    "attention.q_lora_rank": "latent.q_rank",
    "rope.dimension_count": "latent.rope_dim",
    **{key: name for key, name in GGUF_EXPERT_KEYS.items() if "shared" not in key},
    "expert_weights_scale": "experts.scale",
    "expert_weights_norm": "experts.renormalizes",
    "expert_group_count": "experts.groups",
    "expert_group_used_count": "experts.groups_per_token",
}


def _from_hf(reader: Reader, found: Settings) -> Settings:
    kv_heads = reader.read(int, "num_key_value_heads", default=found["num_heads"])
    if kv_heads != found["num_heads"]:
        raise ModelFormatError(
            f"config.json: key 'num_key_value_heads': {kv_heads} is not supported; latent "
            f"attention has as many of them as heads, {found['num_heads']}"
        )
    rope: RopeConfig = found["rope"]
    if rope.kind not in ("default", "yarn"):
        raise ModelFormatError(
            f"config.json: rope type '{rope.kind}' is not supported in this family"
        )
    key = "rope_parameters" if reader.source.get("rope_parameters") else "rope_scaling"
    scaling = Reader(reader.read(dict, key, default={}), f"config.json {key}")
    mscale = scaling.read(float, "mscale_all_dim", default=0.0) if rope.kind == "yarn" else 0.0
    latent = replace(found["latent"], mscale=mscale)
    if found["experts"] is None:
        return {"latent": latent}
    is_v2 = reader.source.get("model_type") == _V2
    experts = _hf_experts(reader, found["experts"], is_v2)
    return {"latent": latent, **_layers(reader, {**found, "experts": experts}, 0 if is_v2 else 3)}


def _hf_experts(reader: Reader, experts: ExpertsConfig, is_v2: bool) -> ExpertsConfig:
    """The experts of a config.json. V2 scores them by softmax, all others by a sigmoid."""
    methods = ("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc",)
    method = reader.read(str, "topk_method", default=methods[0])
    scoring = reader.read(str, "scoring_func", default="softmax" if is_v2 else "sigmoid")
    for key, value, known in (
        ("topk_method", method, methods),
        ("scoring_func", scoring, ("softmax",) if is_v2 else ("sigmoid",)),
        ("norm_topk_prob", experts.renormalizes, (False,) if is_v2 else (False, True)),
        ("moe_layer_freq", reader.read(int, "moe_layer_freq", default=1), (1,)),
    ):
        if value not in known:
            raise ModelFormatError(f"config.json: key '{key}': {value} is not supported")
    shared = reader.read(int, "n_shared_experts", default=0) * experts.size
    experts = replace(experts, shared_size=shared)
    if method == "greedy":
        return replace(experts, groups=1, groups_per_token=1)
    if is_v2:
        return experts
    return replace(
        experts,
        scoring="sigmoid",
        correction=True,
        group_score="best_two",
    )


def _layers(reader: Reader, found: Settings, dense: int) -> Settings:
    """The layers of a config.json. Without keys that say so, the first `dense` have a plain MLP."""
    count = found["num_layers"]
    dense = reader.read(int, "first_k_dense_replace", default=dense)
    kinds: list[Any] = [_SPARSE if index >= dense else _DENSE for index in range(count)]
    if reader.source.get("model_type") == _LITE:
        kinds = reader.read(list, "mlp_layer_types", default=[_DENSE, *[_SPARSE] * (count - 1)])
    if len(kinds) != count or not all(kind in (_DENSE, _SPARSE) for kind in kinds):
        raise ModelFormatError(
            f"config.json: key 'mlp_layer_types' must have '{_DENSE}' or '{_SPARSE}' for each of "
            f"the {count} layers"
        )
    return _layer_settings(found, [kind == _SPARSE for kind in kinds])


def _layer_settings(found: Settings, sparse: list[bool]) -> Settings:
    if not any(sparse):
        return {"experts": None}
    layers = [LayerConfig(None, found["rope"], each) for each in sparse]
    return {"experts": found["experts"], **layer_settings(found, layers)}


def _from_gguf(reader: Reader, found: Settings) -> Settings:
    prefix = reader.read(str, "general.architecture")
    latent = _gguf_latent(reader, prefix, found)
    rope: RopeConfig = found["rope"]
    if rope.kind == "yarn":
        if reader.read(float, f"{prefix}.rope.scaling.attn_factor", default=1.0) != 1:
            raise ModelFormatError(
                f"GGUF metadata: key '{prefix}.rope.scaling.attn_factor' is not supported in this "
                "family"
            )
        # Programs that read these files do not apply YaRN's magnitude to cosines and sines.
        rope = replace(rope, attention_factor=1.0)
    settings: Settings = {"latent": latent, "rope": rope}
    experts: ExpertsConfig | None = found["experts"]
    if experts is None:
        return settings
    experts = _gguf_experts(reader, prefix, experts)
    dense = reader.read(int, f"{prefix}.leading_dense_block_count", default=0)
    sparse = [index >= dense for index in range(found["num_layers"])]
    return {**settings, **_layer_settings({**found, "rope": rope, "experts": experts}, sparse)}


def _gguf_latent(reader: Reader, prefix: str, found: Settings) -> LatentConfig:
    """The latent attention of a GGUF file. In newer files, key_length and value_length are those of
    the cache.
    """
    latent: LatentConfig = found["latent"]
    suffix = "_mla" if reader.has(f"{prefix}.attention.key_length_mla") else ""
    key_dim = reader.read(int, f"{prefix}.attention.key_length{suffix}")
    value_dim = reader.read(int, f"{prefix}.attention.value_length{suffix}")
    logarithm = reader.read(float, f"{prefix}.rope.scaling.yarn_log_multiplier", default=0.0)
    return replace(
        latent,
        nope_dim=key_dim - latent.rope_dim,
        value_dim=value_dim,
        # The file has a tenth of it, in single precision.
        mscale=round(10 * logarithm, 5) if found["rope"].kind == "yarn" else 0.0,
    )


def _gguf_experts(reader: Reader, prefix: str, experts: ExpertsConfig) -> ExpertsConfig:
    gating = reader.read(int, f"{prefix}.expert_gating_func", default=0) or 1
    if gating not in _GATINGS:
        raise ModelFormatError(
            f"GGUF metadata: key '{prefix}.expert_gating_func': {gating} is not supported"
        )
    if not reader.has(f"{prefix}.expert_group_count") and experts.count in _KNOWN_GROUPS:
        groups, used = _KNOWN_GROUPS[experts.count]
        experts = replace(experts, groups=groups, groups_per_token=used)
    shared = reader.read(int, f"{prefix}.expert_shared_count", default=0)
    experts = replace(experts, shared_size=shared * experts.size)
    if _GATINGS[gating] == "softmax":
        return experts
    return replace(experts, scoring="sigmoid", correction=True, group_score="best_two")


def _hf_kind(config: ModelConfig) -> tuple[str, str]:
    if config.experts is None:
        return "YoutuForCausalLM", "youtu"
    if config.experts.scoring == "softmax":
        return "DeepseekV2ForCausalLM", _V2
    return "DeepseekV3ForCausalLM", "deepseek_v3"


DEEPSEEK = Family(
    name="deepseek",
    hf_names=(
        "DeepseekV3ForCausalLM",
        "DeepseekV2ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "YoutuForCausalLM",
    ),
    gguf_names=("deepseek2",),
    weights=decoder(
        _LATENT,
        GATED_MLP,
        BY_EXPERT,
        CORRECTION,
        shared_expert("mlp.shared_experts"),
        input_norms(),
    ),
    hf_keys=_HF,
    gguf_keys=_GGUF,
    always={"num_kv_heads": 1},
    defaults={
        "head_dim": lambda found: found["latent.kv_rank"] + found["latent.rope_dim"],
        "latent.nope_dim": 0,  # `_from_gguf` reads these two
        "latent.value_dim": 0,
    },
    hf_defaults={"latent.nope_dim": REQUIRED, "latent.value_dim": REQUIRED},
    hf_refused={
        "attention_bias": ANY,
        "mlp_bias": ANY,
        "rope_interleave": False,
        "sliding_window": ANY,
        "index_topk": ANY,
    },
    hf_more=_from_hf,
    gguf_more=_from_gguf,
    hf_kind=_hf_kind,
)
