"""Word splits: every known name compiles and loses nothing, and families cut where they should."""

import pytest
from tokenizers import Regex, pre_tokenizers

from engine.core.text.tokenizer_pre import KNOWN_SPLITS, byte_level_words, word_split
from tests.tokenizer_files import CORPUS


def words(name: str, text: str) -> list[str]:
    steps = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in word_split(name).patterns
    ]
    return [word for word, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(KNOWN_SPLITS))
def test_no_split_loses_text(name: str) -> None:
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    for text in CORPUS[:6]:
        assert "".join(words(name, text)) == text
        pieces = [word for word, _ in byte_level_words(word_split(name)).pre_tokenize_str(text)]
        assert set("".join(pieces)) <= alphabet
        assert sum(map(len, pieces)) == len(text.encode())


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'll pay 1234", ["I", "'ll", " pay", " 1234"]),
        ("gpt-2", "WE'LL", ["WE", "'", "LL"]),
        ("smollm", "pay 1234", ["pay", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "WE'LL pay 1234", ["WE", "'LL", " pay", " ", "123", "4"]),
        ("qwen2", "x=12\n\ny", ["x", "=", "1", "2", "\n\n", "y"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("deepseek-v3", "12345你好ok", ["123", "45", "你好", "ok"]),
        ("falcon", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    ],
)
def test_family_cuts(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected
