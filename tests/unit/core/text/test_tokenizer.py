"""Tokenizers from GGUF metadata and from directories: what they add, what they refuse."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.errors import InvalidRequestError, ModelFormatError
from engine.core.text.tokenizer import Detokenizer, RenderedPrompt, Tokenizer
from engine.core.text.tokenizer_to_json import tokenizer_files
from tests.support.files.tokenizer_files import (
    byte_level_metadata,
    sentencepiece_metadata,
    unigram_metadata,
    word_piece_metadata,
    write_directory,
)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata())


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata())


def test_gguf_token_arrays_may_be_lists_tuples_or_numpy(byte_level: Tokenizer) -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = tuple(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], "i4")
    metadata["tokenizer.ggml.merges"] = np.array(metadata["tokenizer.ggml.merges"], dtype=object)
    text = "it's the same 2024 text"
    assert Tokenizer.from_gguf(metadata).encode(text) == byte_level.encode(text)


def test_vocabulary_size_special_ids_and_eos_are_read(byte_level: Tokenizer) -> None:
    assert byte_level.vocab_size == len(byte_level_metadata()["tokenizer.ggml.tokens"])
    assert (byte_level.bos_id, byte_level.bos, byte_level.eos) == (0, "<|endoftext|>", "<|im_end|>")
    assert byte_level.special_ids == {0, 1, 2}
    # The id that the file names comes first; <|endoftext|> ends a generation in any model.
    assert byte_level.eos_ids == (2, 0)
    assert byte_level.is_special(1) and not byte_level.is_special(3)


def test_bos_follows_the_file_and_then_the_family() -> None:
    assert Tokenizer.from_gguf(byte_level_metadata()).encode_prompt("a")[0] != 0
    wanted = Tokenizer.from_gguf(byte_level_metadata(add_bos_token=True))
    assert wanted.encode_prompt("a") == [0, *wanted.encode("a")]
    assert wanted.encode_prompt("a", add_bos=False) == wanted.encode("a")
    assert Tokenizer.from_gguf(byte_level_metadata(pre="llama-bpe")).encode_prompt("a")[0] == 0
    assert Tokenizer.from_gguf(sentencepiece_metadata()).encode_prompt("a")[0] == 1
    both = Tokenizer.from_gguf(sentencepiece_metadata(add_eos_token=True))
    assert both.encode_prompt("") == [1, 2]


def test_a_leading_space_is_added_when_encoding_and_removed_when_decoding(
    sentencepiece: Tokenizer,
) -> None:
    ids = sentencepiece.encode("the fox")
    assert sentencepiece.token_bytes(ids[0]).startswith(b" ")
    assert sentencepiece.decode(ids) == "the fox"
    assert sentencepiece.decode(ids, continuation=True) == " the fox"
    bare = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False))
    assert bare.decode(bare.encode(" the fox")) == " the fox"


def test_no_leading_space_is_added_to_a_continuation(
    sentencepiece: Tokenizer, byte_level: Tokenizer
) -> None:
    for tokenizer in (sentencepiece, byte_level):
        for text in ("the text", " the", "\n", ""):
            ids = tokenizer.encode_continuation(text)
            assert b"".join(map(tokenizer.token_literal, ids)) == text.encode()


def test_characters_without_a_piece_become_bytes(sentencepiece: Tokenizer) -> None:
    assert [sentencepiece.token_bytes(i) for i in sentencepiece.encode("ӝ")][-2:] == [
        b"\xcc",
        b"\x88",
    ]


def test_control_tokens_have_a_name_but_no_text(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(1) == b"" and byte_level.token_literal(1) == b"<|im_start|>"
    ids = [1, *byte_level.encode("hi"), 2]
    assert byte_level.decode(ids) == "hi"
    assert byte_level.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"


def test_ids_beyond_the_vocabulary_have_no_text(byte_level: Tokenizer) -> None:
    # Checkpoints pad their embedding table, so a model can sample such an id.
    assert byte_level.decode([byte_level.vocab_size, -1]) == ""


def test_sequences_with_finds_all_token_sequences_containing_a_text(byte_level: Tokenizer) -> None:
    found = byte_level.sequences_with("the")
    assert tuple(byte_level.encode("the")) in found and tuple(byte_level.encode(" the")) in found
    for ids in found:
        whole, start = (byte_level.decode(part, skip_special=False) for part in (ids, ids[:-1]))
        assert "the" in whole and "the" not in start, ids
    assert any(len(ids) > 1 for ids in found)
    assert byte_level.sequences_with("the") is found, "kept for the next request"
    assert byte_level.sequences_with("\ud800") == ()


def test_rendered_prompt_is_encoded_as_one_text(byte_level: Tokenizer) -> None:
    rendered = RenderedPrompt((1, "user\nhi", 2, "\n"))
    expected = [1, *byte_level.encode("user\nhi"), 2, *byte_level.encode("\n")]
    assert byte_level.encode_rendered(rendered) == expected


@pytest.mark.seconds
def test_control_token_names_in_text_are_parsed_only_if_requested(byte_level: Tokenizer) -> None:
    text = "a<|im_start|>b<|im_end|>"
    start, end = (byte_level.specials.ids[name] for name in ("<|im_start|>", "<|im_end|>"))
    rendered = byte_level.encode_rendered(RenderedPrompt(("a", start, "b", end)))
    assert byte_level.encode(text, parse_special=True) == rendered
    assert not byte_level.special_ids & set(byte_level.encode(text))


def test_a_parsed_bos_is_not_added_again() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata() | {"tokenizer.ggml.add_bos_token": True})
    plain = tokenizer.encode("a")
    bos = tokenizer.bos_id
    assert tokenizer.encode_prompt("a", parse_special=True) == [bos, *plain]
    assert tokenizer.encode_prompt(tokenizer.bos + "a", parse_special=True) == [bos, *plain]
    assert len(tokenizer.encode_prompt(tokenizer.bos + "a")) > 2


def test_encoding_a_long_text_releases_the_gil(byte_level: Tokenizer) -> None:
    encoding = threading.Thread(target=byte_level.encode, args=("ab ba " * 200_000,))
    num_turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 5


def test_a_lone_surrogate_is_a_client_error(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        byte_level.encode("a\ud800b")
    with pytest.raises(InvalidRequestError, match="surrogate"):
        byte_level.encode_rendered(RenderedPrompt((1, "\udc00")))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"pre": "no-such-split"}, "tokenizer.ggml.pre is 'no-such-split'"),
        ({"tokens": []}, "no vocabulary"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1], "merges": ["a b"]}, "'a' twice"),
        ({"tokens": ["a", 7], "token_type": [1, 1]}, "not str"),
        ({"token_type": [1, 1]}, "token_type has 2 entries"),
        ({"merges": []}, "merges is missing"),
        ({"merges": ["a"]}, "two pieces and a space"),
        ({"merges": ["a zzzz"]}, "do not fit the vocabulary"),
        # A merge may not spell a control token either.
        ({"merges": ["<|im_ start|>"]}, "do not fit the vocabulary"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
    ],
)
def test_broken_byte_level_metadata_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelFormatError, match=reason):
        Tokenizer.from_gguf(byte_level_metadata(**changes))


@pytest.mark.parametrize("scores", [None, [0.0], ["high"] * 3])
def test_malformed_token_scores_are_refused(scores: object) -> None:
    with pytest.raises(ModelFormatError, match="scores"):
        Tokenizer.from_gguf(sentencepiece_metadata(scores=scores))


def test_tokenizer_json_and_gguf_give_the_same_tokenizer(
    tmp_path: Path, byte_level: Tokenizer
) -> None:
    loaded = Tokenizer.from_directory(write_directory(tmp_path))
    text = "You'd agree: naïve 你好 <|im_start|> 🙂"
    assert loaded.encode(text) == byte_level.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.special_ids == byte_level.special_ids and loaded.eos_ids == (2, 0)
    assert (loaded.bos, loaded.eos) == ("<|endoftext|>", "<|im_end|>")
    assert loaded.chat_template == byte_level.chat_template


def test_bos_of_a_checkpoint_folder_follows_the_post_processor_and_settings(tmp_path: Path) -> None:
    loaded = Tokenizer.from_directory(write_directory(tmp_path / "adds"))
    assert loaded.encode_prompt("a") == [0, *loaded.encode("a")]
    quiet = Tokenizer.from_directory(write_directory(tmp_path / "quiet", add_bos_token=False))
    assert quiet.encode_prompt("a") == quiet.encode("a")


def test_a_checkpoint_folder_never_runs_code(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    directory = write_directory(
        tmp_path / "model",
        auto_map={"AutoTokenizer": ["tokenization_x.Tokenizer", None]},
        tokenizer_class="Tokenizer",
        trust_remote_code=True,
    )
    (directory / "tokenization_x.py").write_text(f"open({str(canary)!r}, 'w')")
    Tokenizer.from_directory(directory)
    assert not canary.exists()


def test_separate_template_file_wins_and_named_templates_are_read(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    directory = write_directory(tmp_path, chat_template=named)
    assert Tokenizer.from_directory(directory).chat_template == "D"
    (directory / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_directory(directory).chat_template == "J"


def test_added_token_past_the_vocabulary_keeps_its_id(tmp_path: Path) -> None:
    directory = write_directory(tmp_path)
    spec = json.loads((directory / "tokenizer.json").read_text())
    after = max(spec["model"]["vocab"].values()) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec["added_tokens"] += [
        {"id": after + 7, "content": "<|late|>", "special": True, **flags},
        {"id": after + 3, "content": "<tool_call>", "special": False, **flags},
    ]
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    loaded = Tokenizer.from_directory(directory)
    assert loaded.encode("<tool_call>") == [after + 3]
    assert after + 7 not in loaded.encode("<|late|>")
    assert loaded.encode_rendered(RenderedPrompt((after + 7, "a")))[0] == after + 7
    assert loaded.decode([after + 3]) == "<tool_call>" and loaded.vocab_size == after + 8


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("added_tokens", [{"id": 1, "content": "x", "special": True}], "both"),
        ("added_tokens", [{"id": "1", "content": "x", "special": True}], "malformed"),
        ("added_tokens", [{"id": -1, "content": "x", "special": True}], "malformed"),
        ("added_tokens", 7, "malformed"),
        ("decoder", {"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ("model", {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}, "share one id"),
        ("model", {"type": "BPE", "vocab": {"a": -3}, "merges": []}, "malformed"),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "q"]]}, "cannot be used"),
        ("model", {"type": "Unigram", "vocab": [["a", 0.0], ["a", 0.0]]}, "twice"),
        ("model", None, "malformed"),
    ],
)
def test_broken_tokenizer_json_is_refused(
    tmp_path: Path, key: str, value: object, reason: str
) -> None:
    directory = write_directory(tmp_path)
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["added_tokens"] = []
    spec[key] = value
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ModelFormatError, match=reason):
        Tokenizer.from_directory(directory)


def test_missing_and_malformed_tokenizer_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="no tokenizer.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelFormatError, match="not valid JSON"):
        Tokenizer.from_directory(tmp_path)
    write_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [99999]}')
    with pytest.raises(ModelFormatError, match="eos_token_id"):
        Tokenizer.from_directory(tmp_path)


MARKS = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIPS = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
DECODERS: list[dict[str, Any]] = [
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    {
        "type": "Sequence",
        "decoders": [MARKS, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIPS],
    },
]


@pytest.mark.parametrize("decoder", DECODERS)
def test_runs_of_spaces_survive_decoding(tmp_path: Path, decoder: dict[str, Any]) -> None:
    for name, content in tokenizer_files(sentencepiece_metadata()).items():
        (tmp_path / name).write_text(content)
    file = tmp_path / "tokenizer.json"
    spec = json.loads(file.read_text()) | {"decoder": decoder}
    pair = max(spec["model"]["vocab"].values()) + 1
    spec["model"]["vocab"]["▁▁"] = pair
    spec["model"]["merges"].insert(0, ["▁", "▁"])
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    # Gemma's files list runs of spaces like this.
    spec["added_tokens"].append(flags | {"id": pair, "content": "▁▁", "special": False})
    file.write_text(json.dumps(spec))
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in ("    a", "a    b", "\n\n\t  x  ", " ", "   ", "é  ☃  🙂"):
        ids = tokenizer.encode(text)
        assert pair in ids or "  " not in text
        assert tokenizer.decode(ids) == text
        detokenizer = Detokenizer(tokenizer)
        assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == text


@pytest.mark.parametrize("metadata", [unigram_metadata, word_piece_metadata])
def test_encoder_vocabularies_become_the_same_directory(
    tmp_path: Path, metadata: Callable[[], dict[str, Any]]
) -> None:
    for name, content in tokenizer_files(metadata()).items():
        (tmp_path / name).write_text(content)
    ours, theirs = Tokenizer.from_gguf(metadata()), Tokenizer.from_directory(tmp_path)
    for text in ("", "The quick  brown fox", "naïve ½ 🙂", "[SEP] </s>", " a "):
        ids = ours.encode_prompt(text)
        assert theirs.encode_prompt(text) == ids
        assert theirs.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize("key", ["cls_token_id", "seperator_token_id", "unknown_token_id"])
def test_word_piece_vocabularies_without_cls_and_sep_are_refused(key: str) -> None:
    with pytest.raises(ModelFormatError, match="is missing; this vocabulary needs it"):
        Tokenizer.from_gguf(word_piece_metadata(**{key: None}))


def test_the_sarvam_split_marks_spaces_in_bpe_pieces() -> None:
    metadata = byte_level_metadata(tokens=["a", "▁", "▁a"], token_type=[1] * 3, pre="sarvam-moe")
    metadata |= {"tokenizer.ggml.merges": ["▁ a"], "tokenizer.ggml.eos_token_id": None}
    metadata["tokenizer.ggml.bos_token_id"] = None
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("a  a") == [0, 1, 2]
    assert tokenizer.decode([0, 1, 2]) == "a  a"
