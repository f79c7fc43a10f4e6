"""Fill in the middle: which form a vocabulary has, and how a prompt is written in it."""

from types import SimpleNamespace

import pytest

from engine.frontend.prompt_formats import FORMS, find_infill

BOS = 1


def tokenizer(markers: tuple[str, ...]) -> SimpleNamespace:
    """Characters are tokens; markers come after them."""
    ids = {marker: 1000 + index for index, marker in enumerate(markers)}
    return SimpleNamespace(
        token_id=ids.get,
        encode=lambda text: list(map(ord, text)),
        encode_prompt=lambda text: [BOS, *map(ord, text)],
    )


@pytest.mark.parametrize("form", FORMS)
def test_each_infill_format_is_recognized_and_encoded(form):
    vocabulary = tokenizer(tuple(marker for marker, _ in form))
    infill = find_infill(vocabulary)
    assert infill is not None
    texts = {"prefix": "ab", "suffix": "yz", None: ""}
    expected = [BOS]
    for index, (_, part) in enumerate(form):
        expected += [1000 + index, *map(ord, texts[part])]
    assert infill.encode(vocabulary, "ab", "yz") == tuple(expected)


@pytest.mark.parametrize("form", FORMS)
def test_an_incomplete_set_of_infill_tokens_is_not_recognized(form):
    assert find_infill(tokenizer(tuple(marker for marker, _ in form[:-1]))) is None
