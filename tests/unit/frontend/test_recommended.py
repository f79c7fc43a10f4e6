"""The sampling that a model's files recommend: what is read, and what is left out."""

import json
from pathlib import Path

import pytest

from engine.core.interfaces.backend import USUAL_SAMPLING, ModelCard, Preset
from engine.frontend.recommended import CONFIG_NAME, GGUF_PREFIX, of_folder, of_gguf


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            {"temperature": 0.6, "top_k": 20, "eos_token_id": 2, "max_length": 9},
            {"temperature": 0.6, "top_k": 20},
        ),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"temperature": None, "top_p": 7, "min_p": "high"}, {}),
        (None, {}),
    ],
    ids=["read", "greedy", "invalid", "no file"],
)
def test_a_folder_recommends_what_its_generation_config_says(
    tmp_path: Path, given: dict[str, object] | None, found: dict[str, float]
) -> None:
    if given is not None:
        (tmp_path / CONFIG_NAME).write_text(json.dumps(given))
    assert of_folder(tmp_path) == found


def test_a_gguf_file_recommends_under_llama_cpps_keys() -> None:
    keys = {"temp": 0.7, "penalty_repeat": 1.05, "top_k": 40, "sequence": "top_k;temperature"}
    metadata = {GGUF_PREFIX + name: value for name, value in keys.items()} | {"general.name": "x"}
    assert of_gguf(metadata) == {"temperature": 0.7, "repetition_penalty": 1.05, "top_k": 40}


def test_chats_take_the_preset_then_the_files_then_a_low_temperature() -> None:
    def sampling(recommended: dict[str, float] | None, **preset: float) -> dict[str, float]:
        card = ModelCard(
            id="m",
            created=0,
            owned_by="x",
            max_model_len=8,
            backend="native",
            recommended=recommended,
            preset=Preset(parameters=preset) if preset else None,
        )
        return card.chat_sampling

    assert sampling(None) == {}, "another server has defaults of its own"
    assert sampling({}) == USUAL_SAMPLING
    assert sampling({"top_k": 20}) == {**USUAL_SAMPLING, "top_k": 20}
    assert sampling({"temperature": 0.6}, temperature=0.9, max_tokens=5) == {"temperature": 0.9}
