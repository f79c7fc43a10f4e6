"""Damaged tokenizer files: each either loads and works, or is refused by name; nothing else."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ModelFormatError
from engine.core.utils.tokenizer import Tokenizer
from tests.tokenizer_files import byte_level_metadata, sentencepiece_metadata, write_directory

JUNK: list[Any] = [
    *(None, True, 0, -1, 2**40, 1.5, "", "x", "▁", [], {}, [None], {"type": "x"}),
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "missing", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
    {"type": "RobertaProcessing", "sep": ["a", 7], "cls": ["b", 9999], "trim_offsets": True},
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = list(value)[:5] if isinstance(value, dict) else []
    if isinstance(value, list):
        keys = list(range(min(len(value), 3)))
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def damage(value: Any, choose: random.Random) -> None:
    *path, last = choose.choice(list(places(value)))
    for key in path:
        value = value[key]
    action = choose.random()
    if action < 0.2:
        del value[last]
    elif action < 0.4 and isinstance(value, list):
        value.insert(last, copy.deepcopy(choose.choice(value)))
    else:
        value[last] = copy.deepcopy(choose.choice(JUNK))


def survive(load: Callable[[], Tokenizer]) -> bool:
    try:
        tokenizer = load()
    except ModelFormatError:
        return False
    tokenizer.decode(tokenizer.encode_prompt("Hello été <|im_end|> 你好 🙂"))
    return True


@pytest.mark.parametrize("seed", range(4))
def test_damaged_gguf_metadata(seed: int) -> None:
    choose = random.Random(seed)
    outcomes = set()
    for original in [byte_level_metadata(), sentencepiece_metadata()] * 50:
        metadata = copy.deepcopy(original)
        damage(metadata, choose)
        outcomes.add(survive(lambda metadata=metadata: Tokenizer.from_gguf(metadata)))
    assert outcomes == {True, False}


@pytest.mark.parametrize("seed", range(4))
def test_damaged_tokenizer_json(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    directory = write_directory(tmp_path)
    original = json.loads((directory / "tokenizer.json").read_text())
    outcomes = set()
    for _ in range(100):
        spec = copy.deepcopy(original)
        damage(spec, choose)
        (directory / "tokenizer.json").write_text(json.dumps(spec))
        outcomes.add(survive(lambda: Tokenizer.from_directory(directory)))
    assert outcomes == {True, False}


def test_affixes_are_refused_before_the_library_sees_them(tmp_path: Path) -> None:
    # The library aborts the whole process on a prefix that ends within a character of a piece.
    directory = write_directory(tmp_path)
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["model"]["continuing_subword_prefix"] = "x"
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ModelFormatError, match="affixes"):
        Tokenizer.from_directory(directory)
