"""Opening a text encoder: its config, its weights, and the files that say how it pools."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.architectures.base import EncoderConfig, ModelConfig
from engine.core.errors import ModelFormatError
from engine.core.registry.model_registry import architecture
from engine.weights.model import open_model
from engine.weights.pooling import InputPrompts
from engine.worker.encoder_loop import is_encoder
from tests.support.files.gguf_files import random_weights, tiny_config
from tests.support.files.safetensors_files import file_bytes, hf_layout

CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
TYPE = "sentence_transformers.models."
STEPS = [
    {"path": "", "type": f"{TYPE}Transformer"},
    {"path": "1_Pooling", "type": f"{TYPE}Pooling"},
    {"path": "2_Normalize", "type": f"{TYPE}Normalize"},
]


def config_of(**changes: Any) -> ModelConfig:
    stated = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    config: ModelConfig = architecture("bert").config_from_hf(stated)
    return config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with no word about pooling; a pooler and a buffer lie in it unused."""
    config = config_of()
    stored = hf_layout(config, random_weights(config))
    stored["bert.pooler.dense.weight"] = np.zeros((8, 8), np.float32)
    stored["bert.pooler.dense.bias"] = np.zeros(8, np.float32)
    stored["bert.embeddings.position_ids"] = np.zeros((1, 16), np.float32)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(file_bytes(stored))
    return tmp_path


def encoder_of(folder: Path) -> EncoderConfig:
    source = open_model(folder)
    source.close()
    assert is_encoder(source.config) and source.config.encoder is not None
    return source.config.encoder


def write(folder: Path, steps: Any = STEPS, **pooling: Any) -> None:
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_an_encoder_without_pooling_files_uses_mean_pooling(folder: Path) -> None:
    assert encoder_of(folder) == EncoderConfig(2, max_tokens=16, pooling="mean", normalizes=True)


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True, "word_embedding_dimension": 8}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_pooling_files_decide_how_an_encoder_pools(
    folder: Path, settings: dict[str, Any], pooling: str
) -> None:
    write(folder, **settings)
    assert (encoder_of(folder).pooling, encoder_of(folder).normalizes) == (pooling, True)
    write(folder, STEPS[:2], **settings)
    assert (encoder_of(folder).pooling, encoder_of(folder).normalizes) == (pooling, False)


def test_the_maximum_text_length_may_be_below_the_position_table(folder: Path) -> None:
    limits = folder / "sentence_bert_config.json"
    limits.write_text('{"max_seq_length": 9, "do_lower_case": false}')
    assert encoder_of(folder).max_tokens == 9
    limits.write_text('{"max_seq_length": 512}')
    assert encoder_of(folder).max_tokens == 16
    limits.write_text('{"max_seq_length": 0}')
    with pytest.raises(ModelFormatError, match="encoder tokens"):
        encoder_of(folder)


@pytest.mark.parametrize(
    ("steps", "pooling", "message"),
    [
        (STEPS, {"pooling_mode_max_tokens": True}, "max_tokens is not supported"),
        (STEPS, {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, "with"),
        (STEPS, {}, "no way of pooling"),
        (STEPS, {"pooling_mode": "cls", "word_embedding_dimension": 9}, "hidden size"),
        ([*STEPS, {"path": "3", "type": f"{TYPE}Dense"}], {"pooling_mode": "cls"}, "Dense"),
        (STEPS[:1], {"pooling_mode": "cls"}, "Transformer"),
        ({"a": 1}, {}, "must be a list"),
        ([{"path": ""}], {}, "lacks the required key 'type'"),
        ([STEPS[0], STEPS[1] | {"path": "../x"}], {}, "not a plain file name"),
        ([STEPS[0] | {"path": "0_T"}, STEPS[1]], {"pooling_mode": "cls"}, "Transformer"),
    ],
)
def test_unsupported_sentence_transformers_modules_are_refused(
    folder: Path, steps: Any, pooling: dict[str, Any], message: str
) -> None:
    write(folder, steps, **pooling)
    with pytest.raises(ModelFormatError, match=message):
        encoder_of(folder)


def test_sentence_transformers_prompts_are_read(folder: Path) -> None:
    prompts = folder / "config_sentence_transformers.json"
    assert open_model(folder).prompts == InputPrompts()
    prompts.write_text('{"default_prompt_name": "query", "prompts": {"query": "find: "}}')
    assert open_model(folder).prompts == InputPrompts({"query": "find: "}, "find: ")
    prompts.write_text('{"default_prompt_name": null}')
    assert open_model(folder).prompts == InputPrompts()


def test_settings_that_change_input_texts_are_refused(folder: Path) -> None:
    write(folder, pooling_mode="mean", include_prompt=False)
    with pytest.raises(ModelFormatError, match="include_prompt"):
        encoder_of(folder)
    write(folder, pooling_mode="mean")
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(ModelFormatError, match="do_lower_case"):
        encoder_of(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("hidden_act", "relu"),
        ("hidden_size", None),
    ],
)
def test_unsupported_encoder_settings_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ModelFormatError, match=key):
        config_of(**{key: value})


def test_decoders_are_refused_as_encoders_and_gguf_with_advice() -> None:
    assert not is_encoder(tiny_config("llama"))
    with pytest.raises(ModelFormatError, match="safetensors only"):
        architecture("modernbert").config_from_gguf({})
