"""BERT and its descendants: text encoders, in which each token attends to the whole text.

BERT, RoBERTa and nomic-bert are post-norm. A checkpoint may have the head of a cross-encoder, which
scores a pair of texts. Sentence encoders have no head. Settings files next to their weights say how
token states are pooled (`weights/pooling.py`).
"""

from collections.abc import Mapping
from typing import Any, Literal

from engine.architectures.base import (
    EncoderConfig,
    ModelConfig,
    Reader,
    ScoreHead,
)
from engine.architectures.common import GGUF_LAYER_NORM_KEYS
from engine.architectures.family import Family, Keys, More, Settings
from engine.architectures.foreign import ANY
from engine.architectures.weight_rows import PLAIN, Condition, Stored, WeightRow
from engine.core.errors import ModelFormatError

CLASSIFIER = "ForSequenceClassification"
_POOLINGS: Mapping[int, Literal["mean", "cls", "last"]] = {1: "mean", 2: "cls", 3: "last"}
_ACTIVATION_KEYS = ("activation_fn", "sbert_ce_default_activation_function")


def row(
    name: str,
    shape: str,
    hf: str,
    gguf: str,
    bias: str | None = None,
    when: Condition | None = None,
    hf_stored: Stored = PLAIN,
    gguf_stored: Stored = PLAIN,
) -> WeightRow:
    """A weight of an encoder. Names are without ".weight"."""
    names = (f"{name}.weight", shape, f"{hf}.weight", f"{gguf}.weight")
    return WeightRow(*names, bias, when, hf_stored, gguf_stored)


def _has_types(config: ModelConfig, layer: int) -> bool:
    return config.encoder is not None and config.encoder.num_token_types > 0


def _has_score(config: ModelConfig, layer: int) -> bool:
    return config.encoder is not None and config.encoder.head is not None


def _has_score_norm(config: ModelConfig, layer: int) -> bool:
    encoder = config.encoder
    return encoder is not None and encoder.head is not None and encoder.head.norm


def score_rows(dense: str, out: str) -> tuple[WeightRow, ...]:
    """The head of a cross-encoder, by its names in safetensors files."""
    has_bias = "encoder.head.bias"
    return (
        row("score.dense", "DD", dense, "cls", has_bias, _has_score),
        row("score.norm", "D", "head.norm", "cls.norm", None, _has_score_norm),
        row("score.out", "1D", out, "cls.output", "encoder.head", _has_score),
    )


def is_classifier(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(CLASSIFIER) for name in names)


def check_labels(config: Mapping[str, Any]) -> None:
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if count != 1:
        raise ModelFormatError(
            f"config.json: key 'id2label' has {count} labels; only cross-encoders, which score "
            "pairs of texts, are supported, and they have one label"
        )


def squashes(config: Mapping[str, Any]) -> bool:
    """Whether a sigmoid maps the logit of a cross-encoder to a score. Files of
    sentence-transformers may state another activation.
    """
    nested = config.get("sentence_transformers")
    settings = {**config, **(nested if isinstance(nested, Mapping) else {})}
    names = [settings[key] for key in _ACTIVATION_KEYS if settings.get(key) is not None]
    kind = str(names[0]).rpartition(".")[2] if names else "Sigmoid"
    if kind not in ("Sigmoid", "Identity"):
        raise ModelFormatError(
            f"config.json: key 'activation_fn': {names[0]} is not supported "
            "(supported: Sigmoid, Identity)"
        )
    return kind == "Sigmoid"


def _tanh_head(config: Mapping[str, Any]) -> ScoreHead | None:
    if not is_classifier(config):
        return None
    check_labels(config)
    return ScoreHead("tanh", bias=True, norm=False, squashes=squashes(config))


def _learned(offset_key: str | None) -> More:
    """Reads an encoder with learned positions. In RoBERTa, the table of positions starts with rows
    for padding. The last of them has the number under the key `offset_key`.
    """

    def read(reader: Reader, found: Settings) -> Settings:
        kind = reader.read(str, "position_embedding_type", default="absolute")
        if kind != "absolute":
            raise ModelFormatError(
                f"config.json: key 'position_embedding_type': '{kind}' is not supported"
            )
        first = 0 if offset_key is None else reader.read(int, offset_key, default=1) + 1
        length = found["max_position"] - first
        if not 0 <= first <= found["max_position"]:
            raise ModelFormatError(f"config.json: key '{offset_key}' is out of range")
        head = _tanh_head(reader.source)
        encoder = EncoderConfig(
            num_token_types=reader.read(int, "type_vocab_size", default=2),
            max_tokens=length,
            first_position=first,
            pooling="mean" if head is None else "cls",
            normalizes=head is None,
            head=head,
        )
        # Encoders generate no tokens, so no token ends an answer.
        return {"encoder": encoder, "max_position": length, "bos_id": None, "eos_ids": ()}

    return read


def _from_gguf(reader: Reader, found: Settings) -> Settings:
    prefix = reader.read(str, "general.architecture")
    if reader.read(bool, f"{prefix}.attention.causal", default=False):
        raise ModelFormatError(f"GGUF metadata: key '{prefix}.attention.causal' must be false")
    pooling = reader.read(int, f"{prefix}.pooling_type", default=1)
    if pooling not in _POOLINGS:
        raise ModelFormatError(
            f"GGUF metadata: key '{prefix}.pooling_type': {pooling} is not supported (supported: "
            + ", ".join(f"{number} for {name}" for number, name in _POOLINGS.items())
            + ")"
        )
    encoder = EncoderConfig(
        num_token_types=reader.read(int, "tokenizer.ggml.token_type_count", default=0),
        max_tokens=found["max_position"],
        pooling=_POOLINGS[pooling],
    )
    return {"encoder": encoder, "bos_id": None, "eos_ids": ()}


HF_KEYS: Keys = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position",
    "layer_norm_eps": "norm_eps",
}
_POST_NORM = {
    "tie_embeddings": True,  # a checkpoint has no weights of an LM head
    "norm": "layer",
    "norm_bias": True,
    "norm_placement": "sum",
}
_BIASED = {
    "rope": None,
    "gated_mlp": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}


def _bert_rows(prefix: str) -> tuple[WeightRow, ...]:
    layer, hf, blk = "layers.{i}", f"{prefix}.encoder.layer.{{i}}", "blk.{i}"
    tables, norm = f"{prefix}.embeddings", "norm_bias"
    own, out = f"{hf}.attention.self", f"{hf}.attention.output"
    places = Stored(parts="OP", index=1)
    return (
        row("embed", "VD", f"{tables}.word_embeddings", "token_embd"),
        row("position", "PD", f"{tables}.position_embeddings", "position_embd", hf_stored=places),
        row("token_type", "YD", f"{tables}.token_type_embeddings", "token_types", when=_has_types),
        row("embed_norm", "D", f"{tables}.LayerNorm", "token_embd_norm", norm),
        row(f"{layer}.attn.q", "qD", f"{own}.query", f"{blk}.attn_q", "qkv_bias"),
        row(f"{layer}.attn.k", "kD", f"{own}.key", f"{blk}.attn_k", "qkv_bias"),
        row(f"{layer}.attn.v", "kD", f"{own}.value", f"{blk}.attn_v", "qkv_bias"),
        row(f"{layer}.attn.o", "Dq", f"{out}.dense", f"{blk}.attn_output", "out_bias"),
        row(f"{layer}.mlp.up", "FD", f"{hf}.intermediate.dense", f"{blk}.ffn_up", "mlp_bias"),
        row(f"{layer}.mlp.down", "DF", f"{hf}.output.dense", f"{blk}.ffn_down", "mlp_bias"),
        row(f"{layer}.attn_norm", "D", f"{out}.LayerNorm", f"{blk}.attn_output_norm", norm),
        row(f"{layer}.mlp_norm", "D", f"{hf}.output.LayerNorm", f"{blk}.layer_output_norm", norm),
    )


BERT = Family(
    name="bert",
    hf_names=("BertModel", f"Bert{CLASSIFIER}"),
    gguf_names=("bert",),
    weights=(*_bert_rows("bert"), *score_rows("bert.pooler.dense", "classifier")),
    hf_keys=HF_KEYS,
    gguf_keys=GGUF_LAYER_NORM_KEYS,
    hf_activation=("hidden_act", "gelu"),
    always=_POST_NORM | _BIASED,
    defaults={"norm_eps": 1e-12},
    hf_refused={"is_decoder": True, "add_cross_attention": True},
    hf_more=_learned(None),
    gguf_more=_from_gguf,
)

ROBERTA = Family(
    name="roberta",
    hf_names=(
        "RobertaModel",
        "XLMRobertaModel",
        f"Roberta{CLASSIFIER}",
        f"XLMRoberta{CLASSIFIER}",
    ),
    gguf_names=(),  # GGUF files of these models state the architecture "bert"
    weights=(
        *_bert_rows("roberta"),
        *score_rows("classifier.dense", "classifier.out_proj"),
    ),
    hf_keys=HF_KEYS,
    gguf_keys=None,
    hf_activation=("hidden_act", "gelu"),
    always=_POST_NORM | _BIASED,
    defaults={"norm_eps": 1e-12},
    hf_refused={"is_decoder": True, "add_cross_attention": True},
    hf_more=_learned("pad_token_id"),
)

# Keys of the nomic-bert files on the Hub -> the keys that Transformers gave them later.
_NOMIC_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
_NOMIC_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}


def _nomic_view(config: Mapping[str, Any]) -> Mapping[str, Any]:
    view = {_NOMIC_NAMES.get(key, key): value for key, value in config.items()}
    name = view.get("activation_function")
    if name is not None:
        view["hidden_act"] = _NOMIC_ACTIVATIONS.get(name, name) if isinstance(name, str) else name
    return view


def _nomic(reader: Reader, found: Settings) -> Settings:
    length: int = found["max_position"]
    if reader.read(float, "rotary_scaling_factor", default=None) is not None:
        # Beyond the trained length, the files' own code scales RoPE by the length of the batch.
        length = min(length, reader.read(int, "max_trained_positions", default=length))
    encoder = EncoderConfig(reader.read(int, "type_vocab_size", default=2), max_tokens=length)
    return {"encoder": encoder, "max_position": length, "bos_id": None, "eos_ids": ()}


_NOMIC_HF, _NOMIC_QKV = "nomic_bert.encoder.layers.{i}", "qkk"


def _nomic_qkv(part: str, shape: str, index: int) -> WeightRow:
    stored = Stored(parts=_NOMIC_QKV, index=index)
    hf, gguf = f"{_NOMIC_HF}.attn.Wqkv", "blk.{i}.attn_qkv"
    name = f"layers.{{i}}.attn.{part}"
    return row(name, shape, hf, gguf, "qkv_bias", None, stored, stored)


NOMIC_BERT = Family(
    name="nomic_bert",
    hf_names=("NomicBertModel",),
    gguf_names=("nomic-bert",),
    weights=(
        row("embed", "VD", "nomic_bert.embeddings.word_embeddings", "token_embd"),
        row(
            "token_type",
            "YD",
            "nomic_bert.embeddings.token_type_embeddings",
            "token_types",
            when=_has_types,
        ),
        row("embed_norm", "D", "nomic_bert.emb_ln", "token_embd_norm", "norm_bias"),
        _nomic_qkv("q", "qD", 0),
        _nomic_qkv("k", "kD", 1),
        _nomic_qkv("v", "kD", 2),
        row(
            "layers.{i}.attn.o",
            "Dq",
            f"{_NOMIC_HF}.attn.out_proj",
            "blk.{i}.attn_output",
            "out_bias",
        ),
        row(
            "layers.{i}.attn_norm",
            "D",
            f"{_NOMIC_HF}.norm1",
            "blk.{i}.attn_output_norm",
            "norm_bias",
        ),
        row("layers.{i}.mlp.gate", "FD", f"{_NOMIC_HF}.mlp.fc12", "blk.{i}.ffn_gate"),
        row("layers.{i}.mlp.up", "FD", f"{_NOMIC_HF}.mlp.fc11", "blk.{i}.ffn_up"),
        row("layers.{i}.mlp.down", "DF", f"{_NOMIC_HF}.mlp.fc2", "blk.{i}.ffn_down"),
        row(
            "layers.{i}.mlp_norm",
            "D",
            f"{_NOMIC_HF}.norm2",
            "blk.{i}.layer_output_norm",
            "norm_bias",
        ),
    ),
    hf_keys=HF_KEYS | {"head_dim": "head_dim", "qkv_proj_bias": ("qkv_bias", "out_bias")},
    gguf_keys=GGUF_LAYER_NORM_KEYS,
    hf_activation=("hidden_act", "silu"),
    always=_POST_NORM,
    defaults={"norm_eps": 1e-12},
    theta=1000.0,
    hf_refused={
        "prenorm": True,
        "parallel_block": True,
        "use_rms_norm": True,
        "causal": True,
        "rotary_emb_interleaved": True,
        "rotary_emb_scale_base": ANY,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "moe_every_n_layers": ANY,
    },
    hf_view=_nomic_view,
    hf_more=_nomic,
    gguf_more=_from_gguf,
)
