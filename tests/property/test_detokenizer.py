"""Streamed text is the same however the tokens are split, and a stop string is never shown."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import InvalidRequestError
from engine.core.text.stop_strings import StopPattern, StopPatterns, StopStrings
from engine.core.text.tokenizer import Detokenizer, Tokenizer
from tests.support.files.tokenizer_files import CORPUS, byte_level_metadata, sentencepiece_metadata

BYTE_LEVEL = Tokenizer.from_gguf(byte_level_metadata())
SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece_metadata())

tokenizers = st.sampled_from([BYTE_LEVEL, SENTENCEPIECE])
# A padded embedding table can give ids past the vocabulary.
random_ids = st.lists(st.integers(0, 720), max_size=40)
# SentencePiece writes spaces as the character that is left out: it would come back as one.
characters = st.characters(codec="utf-8", exclude_characters="\u2581")
real_texts = st.lists(st.sampled_from(CORPUS), max_size=2).map("".join) | st.text(
    characters, max_size=30
)
stops = st.lists(st.text("ab \n", min_size=1, max_size=4), max_size=3).map(tuple)

PATTERNS = [("a+b",), ("[0-9]{2}", "é"), ("(a|b)(a|b)1", "b.b"), ("\\s[^a]",)]


def chunks(data: st.DataObject, ids: Sequence[int]) -> list[Sequence[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the match that completes first, found by brute force over all substrings."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stop:
                return text[:start], text[start:end]
    return text, None


@given(tokenizers, random_ids, st.booleans(), st.booleans(), st.data())
def test_streamed_detokenization_equals_whole_decode_for_any_chunks(
    tokenizer: Tokenizer, ids: list[int], skip: bool, continuation: bool, data: st.DataObject
) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special=skip, continuation=continuation)
    pushed = [detokenizer.push(chunk) for chunk in chunks(data, ids)]
    text = "".join(pushed) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special=skip, continuation=continuation)


@given(tokenizers, real_texts, st.data())
def test_characters_are_emitted_as_soon_as_their_bytes_are_complete(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    sent, so_far = b"", ""
    for chunk in chunks(data, ids):
        sent += b"".join(map(tokenizer.token_bytes, chunk))
        so_far += detokenizer.push(chunk)
        # The text is valid, so only an incomplete last character is ignored.
        whole = sent.decode("utf-8", "ignore")
        assert so_far == (whole.removeprefix(" ") if tokenizer.drops_leading_space else whole)
    assert so_far == text and detokenizer.flush() == ""


@given(st.text("ab \nc", max_size=40), stops, st.data())
def test_text_is_cut_before_the_first_stop_string(
    text: str, stop: tuple[str, ...], data: st.DataObject
) -> None:
    ids = BYTE_LEVEL.encode(text)
    expected, match = first_stop(text, stop)
    detokenizer = Detokenizer(BYTE_LEVEL, stop)
    out = ""
    for chunk in chunks(data, ids):
        out += detokenizer.push(chunk)
        assert expected.startswith(out), "a character of a stop string was shown"
    assert out + detokenizer.flush() == expected
    assert detokenizer.stopped == match
    assert detokenizer.push(ids) == "" == detokenizer.flush() or match is None


@given(st.text("ab1 \né", max_size=40), stops, st.sampled_from(PATTERNS), st.data())
def test_text_is_cut_after_the_first_stop_pattern_match(
    text: str, stop: tuple[str, ...], patterns: tuple[str, ...], data: st.DataObject
) -> None:
    """A stop string that comes first ends the text before it."""
    before, match = first_stop(text, stop)
    ends = [
        (end, pattern)
        for end in range(len(before) + 1)
        for pattern in patterns
        if re.search(f"(?:{pattern})\\Z", before[:end])
    ]
    expected, match = (before[: ends[0][0]], ends[0][1]) if ends else (before, match)
    detokenizer = Detokenizer(BYTE_LEVEL, stop, patterns=tuple(map(StopPattern, patterns)))
    out = "".join(detokenizer.push(chunk) for chunk in chunks(data, BYTE_LEVEL.encode(text)))
    assert out + detokenizer.flush() == expected
    assert detokenizer.stopped == match


def test_stop_patterns_match_in_linear_time() -> None:
    """Python's own engine would need 2 ** 4000 steps for this one."""
    patterns = StopPatterns((StopPattern("(a+)+b"), StopPattern("(a|aa){1,99}c")))
    assert patterns.push("a" * 4000) == "a" * 4000 and patterns.stopped is None
    assert patterns.push("bc") == "b" and patterns.stopped == "(a+)+b"
    assert patterns.push("b") == ""


def test_a_stop_string_split_over_two_pieces_is_never_emitted() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, ("ab",))
    pieces = [detokenizer.push(BYTE_LEVEL.encode(character)) for character in "cab"]
    assert pieces == ["c", "", ""] and detokenizer.stopped == "ab"


@given(st.text("ab", max_size=30), stops)
def test_only_a_possible_start_of_a_stop_string_is_held_back(
    text: str, stop: tuple[str, ...]
) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, stop)
    out = detokenizer.push(BYTE_LEVEL.encode(text))
    if detokenizer.stopped is None:
        held = text[len(out) :]
        assert held == "" or any(s.startswith(held) for s in stop)


def test_stop_strings_match_characters_across_tokens() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, ("🙂",))
    raw = [BYTE_LEVEL.encode("é")[0], *BYTE_LEVEL.encode("x🙂y")]
    assert "".join(detokenizer.push([i]) for i in raw).endswith("x")
    assert detokenizer.stopped == "🙂"


def test_incomplete_utf8_at_the_end_becomes_a_replacement_character() -> None:
    detokenizer = Detokenizer(SENTENCEPIECE)
    assert detokenizer.push([3 + 0xF0, 3 + 0x9F]) == ""
    assert detokenizer.flush() == "\ufffd" == SENTENCEPIECE.decode([3 + 0xF0, 3 + 0x9F])


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        Detokenizer(BYTE_LEVEL, ("",))


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (("bcd", "c"), "abcd", "ab"),  # the match that completes first
        (("d", "bcd"), "abcd", "a"),  # the longer of two that complete together
        (("abcdef",), "abcdeabcdefg", "abcde"),
        (("xyz",), "ab xy", "ab xy"),  # held back, and emitted at the end
        (("aab",), "aaab", "a"),
    ],
)
def test_stop_strings_are_found_for_every_split_of_the_text(
    stop: tuple[str, ...], text: str, shown: str
) -> None:
    for cut in range(len(text) + 1):
        stops = StopStrings(stop)
        assert stops.push(text[:cut]) + stops.push(text[cut:]) + stops.flush() == shown, cut
        assert (stops.stopped is None) == (shown == text)


def test_only_the_leading_space_of_a_text_is_dropped() -> None:
    ids = SENTENCEPIECE.encode("  a b")
    text = SENTENCEPIECE.decode(ids)
    for cut in range(len(ids) + 1):
        detokenizer = Detokenizer(SENTENCEPIECE)
        assert detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) == text
    going_on = Detokenizer(SENTENCEPIECE, continuation=True)
    assert going_on.push(ids) == f" {text}"
