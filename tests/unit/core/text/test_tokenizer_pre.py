"""Word splits: every known name compiles and loses nothing, and families cut where they should."""

import pytest
from tokenizers import Regex, pre_tokenizers

from engine.core.errors import ModelFormatError
from engine.core.text.tokenizer_pre import KNOWN_SPLITS, byte_level_words, word_split
from tests.support.files.tokenizer_files import CORPUS


def words(name: str, text: str) -> list[str]:
    steps = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in word_split(name).patterns
    ]
    return [word for word, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(KNOWN_SPLITS))
def test_pre_tokenizer_splits_lose_no_text(name: str) -> None:
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
        ("deepseek-llm", "Hi there: 12345 你好", ["Hi", " there", ":", " ", "12345", " ", "你好"]),
        ("kimi-k2", "camelCase你好's 1234/", ["camel", "Case", "你好", "'s", " ", "123", "4", "/"]),
        ("afmoe", "1234567 12 abc", ["1", "234", "567", " ", "12", " abc"]),
        ("superbpe", "in 12345 words", ["in ", "12", "345", " words"]),
        ("tiny_aya", "1234567 1234x", ["1", "234", "567", " ", "123", "4", "x"]),
        ("bloom", "Hi there, 12.5", ["Hi", " there", ",", " 12", ".", "5"]),
        ("viking", "Hi 12", ["Hi", " ", "1", "2"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", " " * 4, " " * 2, " b"]),
        ("chameleon", "a  b-1 IMGIMGABZ", ["a", "  ", "b", "-", "1", " ", "IMGIMGABZ"]),
        ("bailingmoe", "x\n\ny 12", ["x", "\n\n", "y", " ", "1", "2"]),
        ("seed-coder", "a;\n\nb", ["a", ";", "\n\n", "b"]),
        ("exaone-moe", "in the end! 12", ["in the end", "!", " ", "1", "2"]),
        ("laguna", "a;\n\nb", ["a", ";", "\n\n", "b"]),
        ("minicpm5", "pay 1234", ["pay", " ", "123", "4"]),
        ("spark2_5", "a;\n\n12", ["a", ";", "\n", "\n", "1", "2"]),
        ("youtu", "한국어，camelCase 12", ["한국어", "，", "camel", "Case", " ", "1", "2"]),
        ("ufakzeka", "Ankara'dan", ["Ankara", "'dan"]),
    ],
)
def test_pre_tokenizers_split_like_their_family(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


@pytest.mark.parametrize("name", ["afmoe", "superbpe", "tiny_aya"])
def test_a_long_number_is_split_in_linear_time(name: str) -> None:
    # A lookahead to the number's end at each group takes minutes here.
    assert len(words(name, "1" * 100_000)) == 33_334
    assert words(name, "1" * 100_000 + "x")[-1] == "x"


def test_an_unknown_pre_tokenizer_name_is_refused() -> None:
    with pytest.raises(ModelFormatError, match="tokenizer.ggml.pre is 'new-bpe'.*tokenizer.json"):
        word_split("new-bpe")
