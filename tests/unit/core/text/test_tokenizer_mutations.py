"""Damaged tokenizer files: each either loads and works, or is refused by name; nothing else."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import normalizers

from engine.core.errors import ModelFormatError
from engine.core.text.charsmap import check_charsmap
from engine.core.text.tokenizer import Tokenizer
from tests.support.files.tokenizer_files import (
    byte_level_metadata,
    sentencepiece_metadata,
    unigram_metadata,
    word_piece_metadata,
    write_directory,
    write_tekken,
    write_tiktoken,
)

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

SPECIALS = [
    {"rank": 1, "token_str": "<s>", "is_control": True},
    {"rank": 2, "token_str": "</s>", "is_control": True},
]
MARKS = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


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
def test_randomly_damaged_gguf_metadata_loads_or_is_refused(seed: int) -> None:
    choose = random.Random(seed)
    outcomes = set()
    originals = [
        *(byte_level_metadata(), sentencepiece_metadata()),
        *(unigram_metadata(precompiled_charsmap=[]), word_piece_metadata()),
    ]
    for original in originals * 25:
        metadata = copy.deepcopy(original)
        damage(metadata, choose)
        outcomes.add(survive(lambda metadata=metadata: Tokenizer.from_gguf(metadata)))
    assert outcomes == {True, False}


@pytest.mark.parametrize("seed", range(4))
def test_randomly_damaged_tokenizer_json_loads_or_is_refused(seed: int, tmp_path: Path) -> None:
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


def test_randomly_damaged_tekken_json_loads_or_is_refused(tmp_path: Path) -> None:
    choose = random.Random(0)
    file = write_tekken(tmp_path, r"\s+|\S+", special_tokens=SPECIALS) / "tekken.json"
    original = json.loads(file.read_text())
    outcomes = set()
    for _ in range(100):
        content = copy.deepcopy(original)
        damage(content, choose)
        file.write_text(json.dumps(content))
        outcomes.add(survive(lambda: Tokenizer.from_directory(tmp_path)))
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("YQ==", "not a token and its rank"),
        ("YQ== x", "not a token and its rank"),
        ("YQ== -1", "not a token and its rank"),
        ("eHg= 99999999999999999999", "not a token and its rank"),
        ("eHg= 5", "same rank"),
        ("YQ== 9000", "malformed or there twice"),
        ("Y 9000", "malformed or there twice"),
        (" 9000", "malformed or there twice"),
    ],
)
def test_malformed_tiktoken_lines_are_refused(tmp_path: Path, line: str, words: str) -> None:
    file = write_tiktoken(tmp_path, "qwen.tiktoken") / "qwen.tiktoken"
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ModelFormatError, match=words):
        Tokenizer.from_directory(tmp_path)


def test_tiktoken_ranks_of_an_unknown_family_are_refused(tmp_path: Path) -> None:
    directory = write_tiktoken(tmp_path, "tokenizer.model", model_type="other")
    with pytest.raises(ModelFormatError, match="how 'other' splits text"):
        Tokenizer.from_directory(directory)
    (directory / "config.json").write_text('{"model_type": "chatglm"}')
    with pytest.raises(ModelFormatError, match="added_tokens_decoder"):
        Tokenizer.from_directory(directory)
    named = {"added_tokens_decoder": {"9000": {"content": "<|user|>", "special": True}}}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    assert Tokenizer.from_directory(directory).token_id("<|user|>") == 9000
    (directory / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(ModelFormatError, match="SentencePiece model"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize(
    "steps",
    [
        [{"type": "Replace", "pattern": {"String": "▁"}, "content": ""}],
        [{"type": "Metaspace", "replacement": "_"}],
        [{"type": "ByteLevel"}, {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}],
        [MARKS, {"type": "Strip", "content": " ", "start": 2, "stop": 0}],
        [MARKS, {"type": "Strip", "content": "x", "start": 1, "stop": 0}],
        [{"type": "CTC"}],
        [],
    ],
)
def test_decoders_that_change_the_text_are_refused(
    tmp_path: Path, steps: list[dict[str, Any]]
) -> None:
    file = write_directory(tmp_path) / "tokenizer.json"
    spec = json.loads(file.read_text()) | {"decoder": {"type": "Sequence", "decoders": steps}}
    file.write_text(json.dumps(spec))
    with pytest.raises(ModelFormatError, match="decodes with"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("charsmap", [None, 5, "?", "AAAA", "BAAAAP////8="])
def test_a_damaged_character_map_in_tokenizer_json_is_refused(
    tmp_path: Path, charsmap: Any
) -> None:
    file = write_directory(tmp_path) / "tokenizer.json"
    step = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    spec = json.loads(file.read_text())
    spec["normalizer"] = {"type": "Sequence", "normalizers": [step]}
    file.write_text(json.dumps(spec))
    with pytest.raises(ModelFormatError, match="precompiled_charsmap is not"):
        Tokenizer.from_directory(tmp_path)


def test_subword_affixes_are_refused(tmp_path: Path) -> None:
    # The library aborts the whole process on a prefix that ends within a character of a piece.
    directory = write_directory(tmp_path)
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["model"]["continuing_subword_prefix"] = "x"
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ModelFormatError, match="affixes"):
        Tokenizer.from_directory(directory)


def test_damaged_character_maps_load_or_are_refused() -> None:
    choose = random.Random(0)
    original = bytes(unigram_metadata()["tokenizer.ggml.precompiled_charsmap"])
    every = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x1F000))))
    outcomes = set()
    for size in (3, 4, 1000, *[len(original)] * 17):
        data = bytearray(original[:size])
        for _ in range(choose.choice((1, 1, 50))):
            data[choose.randrange(size)] = choose.randrange(256)
        charsmap = bytes(data)
        try:
            check_charsmap(charsmap, "the map")
        except ModelFormatError:
            outcomes.add(False)
        else:
            normalizers.Precompiled(charsmap).normalize_str(every)  # a panic would fail the test
            outcomes.add(True)
    assert outcomes == {True, False}


@pytest.mark.parametrize("key", ["model", "add_bos_token", "add_space_prefix"])
def test_arrays_in_place_of_single_metadata_values_are_refused(key: str) -> None:
    for values in (np.zeros(0), np.arange(3)):
        with pytest.raises(ModelFormatError, match=f"tokenizer.ggml.{key}"):
            Tokenizer.from_gguf(sentencepiece_metadata(**{key: values}))


def test_malformed_vocabularies_are_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path)
    original = json.loads((directory / "tokenizer.json").read_text())
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}

    def refused(words: str, **changes: Any) -> None:
        (directory / "tokenizer.json").write_text(json.dumps(original | changes))
        with pytest.raises(ModelFormatError, match=words):
            Tokenizer.from_directory(directory)

    for entry in (5, "ab", ["a"], ["a", 1, 2], [{}, 0.0], ["a", "b"]):
        model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], entry]}
        refused("pieces with their scores", model=model, decoder=metaspace, added_tokens=[])
    processor = copy.deepcopy(original["post_processor"])
    processor["special_tokens"]["<|endoftext|>"]["ids"] = [5000]
    refused("post_processor adds id 5000", post_processor=processor)
    # A table would have as many rows as the largest id.
    far = original["added_tokens"][0] | {"id": 2**23}
    refused("malformed", added_tokens=[far])
    vocab = original["model"]["vocab"] | {"far": 2**23}
    refused("malformed", model=original["model"] | {"vocab": vocab})


def test_a_lone_surrogate_in_the_chat_template_is_refused(tmp_path: Path) -> None:
    pair = write_directory(tmp_path / "pair", chat_template='{{ "\U0001f642" }}')
    assert "\\ud83d" in (pair / "tokenizer_config.json").read_text()
    assert Tokenizer.from_directory(pair).chat_template == '{{ "\U0001f642" }}'
    half = write_directory(tmp_path / "half", chat_template='{{ "\ud83d" }}')
    with pytest.raises(ModelFormatError, match="surrogates not allowed"):
        Tokenizer.from_directory(half)


def test_a_template_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path)
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFormatError, match="not valid UTF-8"):
        Tokenizer.from_directory(directory)
