"""Hybrids with Gated DeltaNet: Qwen3-Next."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.architectures.base import ModelConfig, Reader
from engine.architectures.common import (
    ATTENTION_BIAS,
    GATED_MLP,
    GGUF_EXPERT_KEYS,
    HF_KEYS,
    Rows,
    attends,
    attention,
    decoder,
    experts,
    has_shared,
    head_norms,
    input_norms,
    row,
    shared_expert,
)
from engine.architectures.family import Family, Settings
from engine.architectures.hybrids.lfm2 import (
    GGUF_STATE,
    HYBRID_GGUF_KEYS,
    LINEAR,
    conv_row,
    has_state,
    inner_size,
    layer_mixers,
    layers_of,
    mixer_row,
    vector_row,
    with_head_dim,
    written_types,
)
from engine.architectures.hybrids.states import Mixer
from engine.architectures.layers import sparse_layers
from engine.architectures.weight_rows import Stored, WeightRow


def _qwen_view(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lists the types of the layers if a config.json states only how often attention occurs."""
    if config.get("layer_types") is not None:
        return config
    reader = Reader(config, "config.json")
    period = reader.read(int, "full_attention_interval", default=4)
    count = min(max(reader.read(int, "num_hidden_layers"), 0), 1024)
    kinds = [LINEAR if period < 1 or (i + 1) % period else "full_attention" for i in range(count)]
    return {**config, "layer_types": kinds}


def _with_mixers(settings: Settings, found: Settings, mixers: list[Mixer]) -> Settings:
    """The layers of `settings`, which say where experts are, with these mixers."""
    listed = settings.get("layers") or layers_of(found, mixers)["layers"]
    layers = (replace(each, mixer=mixer) for each, mixer in zip(listed, mixers, strict=True))
    return {**settings, "layers": tuple(layers)}


def _qwen_from_hf(reader: Reader, found: Settings) -> Settings:
    mixers = layer_mixers(reader, found["num_layers"], {LINEAR: "delta"})
    return _with_mixers(sparse_layers(reader, found), found, mixers)


def _qwen_from_gguf(reader: Reader, found: Settings) -> Settings:
    key = f"{reader.read(str, 'general.architecture')}.full_attention_interval"
    period, count = reader.read(int, key, default=4), found["num_layers"]
    mixers: list[Mixer] = [
        "delta" if period < 1 or (i + 1) % period else "attention" for i in range(count)
    ]
    return {"state": with_head_dim(reader, found["state"]), **_with_mixers({}, found, mixers)}


def _qwen_gguf_written(config: ModelConfig) -> Settings:
    first = config.attention_layers[0] + 1
    return {**inner_size(config), "full_attention_interval": first}


def _delta(part: str, shape: str, hf: tuple[str, Stored], gguf: tuple[str, Stored]) -> WeightRow:
    (theirs, in_hf), (name, in_gguf) = hf, gguf
    return row(
        f"mixer.{part}", shape, f"linear_attn.{theirs}", name, None, has_state, in_hf, in_gguf
    )


def _delta_rows() -> Rows:
    """The weights of Gated DeltaNet. Hugging Face's files have the rows of each key head together,
    GGUF files only those of beta and alpha.
    """
    plain = Stored()
    parts = {"q": "Q", "k": "Q", "v": "I"}
    rows = [
        _delta(
            *(part, f"{letter}D"),
            ("in_proj_qkvz", Stored("BBWW", index, "G")),
            ("attn_qkv", Stored("QQI", index)),
        )
        for index, (part, letter) in enumerate(parts.items())
    ]
    in_hf = Stored("BBWW", 3, "G")
    rows.append(_delta("gate", "ID", ("in_proj_qkvz", in_hf), ("attn_gate", plain)))
    for index, part in enumerate(("beta", "alpha")):
        stored = Stored("RR", index, "G")
        rows.append(_delta(part, "TD", ("in_proj_ba", stored), ("ssm_ba", stored)))
    return (
        *rows,
        conv_row("linear_attn.conv1d", "ssm_conv1d"),
        vector_row("dt_bias", "T", "linear_attn.dt_bias", "ssm_dt.bias", plain, plain),
        vector_row("decay", "T", "linear_attn.A_log", "ssm_a", Stored(is_log=True), plain),
        row("mixer.norm", "U", "linear_attn.norm", "ssm_norm", when=has_state),
        mixer_row("o", "DI", "linear_attn.out_proj", "ssm_out"),
    )


# Qwen3-Next: Gated DeltaNet in most layers. The other layers have attention with a gate, whose rows
# follow those of each query head. Norms are stored minus one.
QWEN3_NEXT = Family(
    name="qwen3_next",
    hf_names=("Qwen3NextForCausalLM",),
    gguf_names=("qwen3next",),
    weights=decoder(
        (
            *(
                row(
                    f"attn.{name}",
                    "qD",
                    "self_attn.q_proj",
                    "attn_q",
                    "qkv_bias",
                    attends,
                    Stored("HH", index, "N"),
                    Stored("HH", index, "N"),
                )
                for index, name in enumerate(("q", "gate"))
            ),
            *attention()[1:],
        ),
        _delta_rows(),
        GATED_MLP,
        experts("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
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
        input_norms(added=1.0, mlp="post_attention_norm"),
        head_norms("H", "H", added=1.0),
        added=1.0,
    ),
    hf_keys=HF_KEYS
    | ATTENTION_BIAS
    | {
        "num_experts": "experts.count",
        "num_experts_per_tok": "experts.per_token",
        "moe_intermediate_size": "experts.size",
        "shared_expert_intermediate_size": "experts.shared_size",
        "norm_topk_prob": "experts.renormalizes",
        "linear_conv_kernel_dim": "state.conv_size",
        "linear_key_head_dim": "state.state_size",
        "linear_value_head_dim": "state.head_dim",
        "linear_num_key_heads": "state.groups",
        "linear_num_value_heads": "state.heads",
    },
    gguf_keys=HYBRID_GGUF_KEYS
    | {"attention.head_count_kv": "num_kv_heads"}
    | GGUF_EXPERT_KEYS
    | GGUF_STATE,
    always={"qk_norm": "head", "attention_gate": True, "experts.shared_gate": True},
    defaults={"experts.renormalizes": True},
    rotated=0.25,
    hf_view=_qwen_view,
    hf_more=_qwen_from_hf,
    gguf_more=_qwen_from_gguf,
    hf_written=lambda config: written_types(config, LINEAR),
    gguf_written=_qwen_gguf_written,
)
