"""Tokenizers that are damaged, or of another model than the weights, are refused; and by a limited
process, before the server reads them (SEC-41, FLT-19; T4).

Random damage is in test_tokenizer_mutations.py of tests/unit/core/text, rules one by one in
test_tokenizer.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.backends.custom.engine_settings import VALIDATOR
from engine.core.errors import ModelFormatError
from engine.core.sandbox.checkpoint_validation import validate
from engine.frontend.text_model import load_text
from tests.support.files import checkpoint_folders

Change = Callable[[dict[str, Any]], None]


def other_model(spec: dict[str, Any]) -> None:
    """More pieces than the weights have rows."""
    vocab = spec["model"]["vocab"]
    vocab |= {f"zz{number}": len(vocab) + number for number in range(100)}


def one_id_far_away(spec: dict[str, Any]) -> None:
    spec["model"]["vocab"]["zz"] = 2**31


def negative_id(spec: dict[str, Any]) -> None:
    spec["model"]["vocab"]["zz"] = -1


def two_pieces_of_one_id(spec: dict[str, Any]) -> None:
    vocab = spec["model"]["vocab"]
    vocab["zz"] = next(iter(vocab.values()))


def merges_of_nothing(spec: dict[str, Any]) -> None:
    spec["model"]["merges"] = [["no such", "pieces"]]


def control_token_far_away(spec: dict[str, Any]) -> None:
    spec["added_tokens"][0]["id"] = 2**40


@pytest.mark.parametrize(
    "change",
    [
        other_model,
        one_id_far_away,
        negative_id,
        two_pieces_of_one_id,
        merges_of_nothing,
        control_token_far_away,
    ],
)
def test_a_tokenizer_that_does_not_fit_the_weights_is_refused(
    tmp_path: Path, change: Change
) -> None:
    checkpoint_folders.write_hf(tmp_path, "llama")
    file = tmp_path / "tokenizer.json"
    spec = json.loads(file.read_text())
    change(spec)
    file.write_text(json.dumps(spec))
    with pytest.raises(ModelFormatError) as raised:
        load_text(tmp_path)
    assert len(str(raised.value)) < 1000
    if change is other_model:
        with pytest.raises(ModelFormatError, match="different models"):
            validate(tmp_path, VALIDATOR)


def test_padding_rows_of_the_vocabulary_and_extra_control_tokens_are_accepted(
    tmp_path: Path,
) -> None:
    config = checkpoint_folders.write_hf(tmp_path, "llama")  # with rows that only pad the table
    file = tmp_path / "tokenizer.json"
    spec = json.loads(file.read_text())
    beyond = {"id": config.vocab_size, "content": "<|pad|>", "special": True}
    spec["added_tokens"].append(spec["added_tokens"][0] | beyond)
    file.write_text(json.dumps(spec))
    assert load_text(tmp_path).tokenizer.vocab_size == config.vocab_size + 1
