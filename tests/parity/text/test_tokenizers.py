"""Our tokenizers against Transformers, `tokenizers`, SentencePiece, and its BPE written out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from engine.core.text.chat_template import ChatTemplate
from engine.core.text.tokenizer import Tokenizer
from tests.support.files.tokenizer_files import (
    CORPUS,
    byte_level_engine,
    byte_level_metadata,
    ranked_tokens,
    read_gguf,
    sentencepiece_metadata,
    unigram_metadata,
    unigram_model,
    word_piece_engine,
    word_piece_metadata,
    write_directory,
    write_tekken,
    write_tiktoken,
)

WORDS = [
    *("Hello world", "it's we've I'll you'd they're", "IT'S WE'VE", "don’t", "O'Reilly's"),
    *("été à Noël", "Straße", "ÅNGSTRÖM", "ﬁne", "e\u0301", "İstanbul", "naïve café"),
    *("你好世界", "こんにちは世界", "안녕하세요", "Привет мир", "مرحبا بالعالم", "שלום", "हिन्दी"),
    *("🙂", "👩‍👩‍👧‍👦", "🇫🇷🇩🇪", "a🚀b", "½ ² ³ Ⅷ ٣ ४", "∑∫√", "→⇒", "€ £ ¥"),
    *("0", "12", "123", "1234567", "3.14159", "1,000,000", "v2.0.1", "2024-01-31", "0xFF"),
    *("foo(bar, baz[0])", "if (x<=y && z!=w) {", "snake_case camelCase", "#!/bin/sh", "a->b::c"),
    *("<div class='x'>", "https://example.com/a?b=c&d=%20", "user@example.com", "C:\\dir"),
    *("a\u00a0b", "a\u200bb", "a\u3000b", "\ufeffa", "a\x00b", "\x7f", "a\u2028b", "\ud7ff"),
]
SPACES = ["", " ", "  ", "   ", "\n", "\n\n", " \n ", "\t", "\t\t", "\r\n", "\n   \n", "    "]
TEXTS = [
    *WORDS,
    *SPACES,
    *(f"{left}{word}{right}" for word in WORDS[::3] for left in SPACES[1:] for right in ("", " ")),
    *(a + b for a, b in zip(WORDS, WORDS[7:], strict=False)),
    *CORPUS[:6],
    " ".join(WORDS),
    "a" * 300,
    "ab " * 100,
]


@pytest.fixture(scope="module")
def ours(default_model: Path) -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(default_model))


@pytest.fixture(scope="module")
def theirs(default_model: Path) -> Any:
    from transformers import AutoTokenizer

    mapped = np.memmap
    with pytest.MonkeyPatch.context() as patched:
        # Its reader takes a million slices of the file. Those of a plain array take half the time.
        patched.setattr(
            np, "memmap", lambda *given, **named: mapped(*given, **named).view(np.ndarray)
        )
        loaded = AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)
    # The model's own tokenizer.json cuts numbers into digits; reading a GGUF file, Transformers
    # leaves that step out.
    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return loaded


def test_default_model_tokenization_matches_transformers(ours: Tokenizer, theirs: Any) -> None:
    assert len(TEXTS) > 300
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == text == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_default_model_tokenization_matches_transformers_on_random_unicode(
    ours: Tokenizer, theirs: Any
) -> None:
    @settings(max_examples=300, deadline=None)
    @given(st.text(max_size=60))
    @example("a<|im_end|>b")
    def check(text: str) -> None:
        # Ours never makes a control token of a client's text, so neither may the reference.
        ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == ids
        # Not always the text itself: this vocabulary has no piece for a few rare bytes.
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)

    check()


def test_default_model_chat_prompt_matches_transformers(ours: Tokenizer, theirs: Any) -> None:
    template = ChatTemplate(ours.chat_template, ours.bos, ours.eos)
    conversations = [
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1 < 2 > [0]"}],
        [
            {"role": "user", "content": "\n\nTwo  spaces\t"},
            {"role": "assistant", "content": "été 🙂"},
            {"role": "user", "content": ""},
        ],
    ]
    for messages in conversations:
        for generate in (True, False):
            rendered = template.render(messages, ours.specials, add_generation_prompt=generate)
            expected = theirs.apply_chat_template(messages, add_generation_prompt=generate)
            assert ours.encode_rendered(rendered) == list(expected["input_ids"])


def test_byte_level_bpe_matches_the_tokenizers_library(tmp_path: Path) -> None:
    reference = byte_level_engine()
    from_gguf = Tokenizer.from_gguf(byte_level_metadata())
    from_directory = Tokenizer.from_directory(write_directory(tmp_path))
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert from_gguf.encode(text) == ids == from_directory.encode(text)
        assert from_gguf.decode(ids) == reference.decode(ids) == text


def sentencepiece_pieces(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE, literally: join the best-scored neighbours, leftmost first."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [a + b for a, b in zip(symbols, symbols[1:], strict=False)]
        candidates = [(-scores[piece], i) for i, piece in enumerate(joined) if piece in scores]
        if not candidates:
            return symbols
        _, at = min(candidates)
        symbols[at : at + 2] = [joined[at]]


def test_sentencepiece_bpe_matches_its_algorithm() -> None:
    metadata = sentencepiece_metadata()
    tokenizer = Tokenizer.from_gguf(metadata)
    pieces = metadata["tokenizer.ggml.tokens"]
    scores = dict(zip(pieces[259:], metadata["tokenizer.ggml.scores"][259:], strict=True))
    index = {piece: i for i, piece in enumerate(pieces)}

    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from(TEXTS) | st.text(max_size=40))
    def check(text: str) -> None:
        expected: list[int] = []
        for symbol in sentencepiece_pieces(text, scores):
            known = index.get(symbol)
            expected += [known] if known else [3 + byte for byte in symbol.encode()]
        assert tokenizer.encode(text) == expected
        # The mark of a space is itself a character, and comes back as what it marks.
        assert tokenizer.decode(expected) == text.replace("▁", " ")

    check()


def test_unigram_matches_sentencepiece() -> None:
    tokenizer, reference = Tokenizer.from_gguf(unigram_metadata()), unigram_model()
    unknown = reference.unk_id()
    for text in TEXTS:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode_prompt(text) == [*ids, reference.eos_id()]
        if unknown not in ids:  # SentencePiece writes an unknown token as "⁇"
            assert tokenizer.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_piece_matches_the_tokenizers_library(lowercase: bool) -> None:
    reference = tokenizers.Tokenizer.from_str(word_piece_engine().to_str())
    reference.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    metadata = word_piece_metadata(**({} if lowercase else {"normalizer.lowercase": False}))
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode_prompt(text) == [2, *ids, 3]
        assert tokenizer.decode(ids) == reference.decode(ids)


CASED = (  # Mistral's pattern
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = (  # Qwen's pattern
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def same_as_tiktoken(tokenizer: Tokenizer, pattern: str, first_id: int) -> None:
    reference = tiktoken.Encoding(
        "x", pat_str=pattern, mergeable_ranks=ranked_tokens(), special_tokens={}
    )
    for text in TEXTS:
        ids = [first_id + rank for rank in reference.encode_ordinary(text)]
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text


def test_tekken_matches_tiktoken(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_tekken(tmp_path, CASED))
    same_as_tiktoken(tokenizer, CASED, first_id=30)
    assert tokenizer.encode_prompt("")[:1] == [1] and tokenizer.eos_ids == (2,)
    assert tokenizer.token_id("[INST]") == 3 and tokenizer.token_id("<SPECIAL_29>") == 29
    assert tokenizer.encode("[INST]") != [3]


def test_tiktoken_file_matches_tiktoken(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_tiktoken(tmp_path, "qwen.tiktoken"))
    same_as_tiktoken(tokenizer, DIGITS, first_id=0)
    count = len(ranked_tokens())
    assert tokenizer.token_id("<|im_end|>") == count + 2
    assert tokenizer.vocab_size == count + 208
