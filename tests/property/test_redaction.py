"""The redactor gives the same result for streamed pieces as for the whole text."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.core.interfaces.plugin import TextFilter
from engine.plugins.channel import FilteredText, mistake_in
from engine.plugins.pii import PiiRedactor
from engine.plugins.pii_patterns import KINDS

PRIVATE = (
    "bob@example.com",
    "a.b+c@sub.example.co.uk",
    "4111 1111 1111 1111",
    "5500-0000-0000-0004",
    "378282246310005",
    "DE89 3704 0044 0532 0130 00",
    "GB29NWBK60161331926819",
    "10.0.0.255",
    "fe80::1ff:fe23:4567:890a",
    "::1",
    "123-45-6789",
    "+1 (555) 123-4567",
    "555-123-4567",
    "0171/1234567",
)
# Prefixes, suffixes and neighbours of the secrets above, and look-alikes.
NEAR = (
    *(
        "@",
        ".",
        "-",
        " ",
        "+",
        "(",
        ") ",
        ":",
        "::",
        "/",
        "\n",
        ", ",
        "x",
        "0",
        "4",
        "41",
        "DE",
        "é",
    ),
    *("谢", "12", "1234", "5551", "2024-01-02", "v1.2.3.4.5", "12:30:45", "1700000000", "user"),
)
texts = st.lists(st.sampled_from(PRIVATE + NEAR), max_size=24).map("".join)
cuts = st.lists(st.integers(1, 12), max_size=400)


def streamed(text: str, sizes: list[int], text_filter: TextFilter) -> str:
    channel = FilteredText(text_filter)
    written, position = "", 0
    for size in [*sizes, len(text)]:
        piece = text[position : position + size]
        position += len(piece)
        channel.add(piece, ())
        is_last = position >= len(text)
        made = text_filter(channel.pending, is_last)
        assert mistake_in(made, len(channel.pending), is_last) is None
        written += channel.settle(made, is_last)[0]
        if is_last:
            break
    return written


@settings(max_examples=250, deadline=None)
@given(texts, cuts)
@example("bob@example.com", [1] * 15)
@example("+1 (555) 123-4567 4111 1111 1111 1111", [3] * 20)
@example("a" * 500 + "@example.com", [7] * 100)
@example("1 " * 300, [1] * 600)
def test_streamed_pieces_are_redacted_like_the_whole_text(text: str, sizes: list[int]) -> None:
    redactor = PiiRedactor()
    whole = redactor.redact(text)
    made = redactor.text_filter(None)  # type: ignore[arg-type]
    assert made is not None
    assert streamed(text, sizes, made) == whole


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(PRIVATE), st.sampled_from((" ", "\n", ", ", "谢", '"')), cuts)
def test_pii_is_never_emitted_by_the_streaming_redactor(
    private: str, around: str, sizes: list[int]
) -> None:
    made = PiiRedactor().text_filter(None)  # type: ignore[arg-type]
    assert made is not None
    written = streamed(f"so{around}{private}{around}it is", sizes, made)
    assert private not in written
    assert any(kind.label in written for kind in KINDS.values())


def test_the_redactor_holds_back_little_of_plain_text() -> None:
    made = PiiRedactor().text_filter(None)  # type: ignore[arg-type]
    assert made is not None
    channel = FilteredText(made)
    for word in ("The", " quick", " brown", " FOX", " has", " 3", " legs"):
        channel.add(word, ())
        channel.settle(made(channel.pending, False), False)
        assert len(channel.pending) <= len("3 legs")
