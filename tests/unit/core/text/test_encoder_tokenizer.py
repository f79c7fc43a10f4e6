"""WordPiece tokenizers from small files made on the spot: ends, decoding, and what is refused."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ModelFormatError
from engine.core.text.tokenizer import Tokenizer
from tests.unit.core.text.test_tokenizer_mutations import damage, survive

CONTROL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PIECES = (*CONTROL, "un", "##believ", "##able", "hello", "[", "]", "cls", "a", "##b")


def write(folder: Path, *, normalized: bool = False, **model: Any) -> Path:
    token = {"single_word": False, "lstrip": False, "rstrip": False, "special": True}
    template = [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
    ]
    spec = {
        "version": "1.0",
        "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [
            token | {"id": i, "content": text, "normalized": normalized}
            for i, text in enumerate(CONTROL)
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": template,
            "special_tokens": {
                text: {"id": text, "ids": [CONTROL.index(text)], "tokens": [text]}
                for text in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {piece: i for i, piece in enumerate(PIECES)},
        }
        | model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def test_encoder_prompts_get_cls_and_sep_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path))
    assert tokenizer.encode_prompt("Unbelievable HELLO") == [2, 4, 5, 6, 7, 3]
    assert tokenizer.encode("hello") == [7]
    assert tokenizer.encode_prompt("") == [2, 3]
    assert tokenizer.decode([2, 4, 5, 6, 7, 3]) == "unbelievable hello"
    assert tokenizer.vocab_size == len(PIECES)


@pytest.mark.parametrize("normalized", [False, True])
def test_control_tokens_in_a_text_are_text(tmp_path: Path, normalized: bool) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path, normalized=normalized))
    assert tokenizer.encode_prompt("[CLS] a") == [2, 8, 10, 9, 11, 3]
    assert tokenizer.encode("zebra [SEP]") == [1, 8, 1, 9]


@pytest.mark.parametrize(
    "model",
    [
        {"continuing_subword_prefix": "@@"},
        {"max_input_chars_per_word": 10**6},
        {"max_input_chars_per_word": "many"},
    ],
)
def test_unusual_word_piece_settings_are_refused(tmp_path: Path, model: dict[str, Any]) -> None:
    with pytest.raises(ModelFormatError, match="WordPiece"):
        Tokenizer.from_directory(write(tmp_path, **model))


@pytest.mark.parametrize("seed", range(3))
def test_damaged_word_piece_files_load_or_are_refused(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    file = write(tmp_path) / "tokenizer.json"
    original = json.loads(file.read_text())
    outcomes = set()
    for _ in range(150):
        spec = copy.deepcopy(original)
        damage(spec, choose)
        file.write_text(json.dumps(spec))
        outcomes.add(survive(lambda: Tokenizer.from_directory(tmp_path)))
    assert outcomes == {True, False}
