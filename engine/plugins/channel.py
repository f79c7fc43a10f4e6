"""Passes one text of an answer through a plugin's filter, together with its tokens.

The filter says how many characters are final and which are replaced. This module applies the edits.
Tokens with log-probabilities are sent with the text. If an edit changes part of a token, the token
shows the edited text. So the tokens still spell the text and don't reveal what was replaced.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core.interfaces.backend import TokenText
from engine.core.interfaces.plugin import Edit, Filtered, TextFilter


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token and its character range in the text. `start` is None if the range is unknown."""

    shown: TokenText
    start: int | None
    end: int


def hidden(token: TokenText, text: str = "") -> TokenText:
    """The token with `text` instead of its own text, and without alternatives."""
    return TokenText(text, text.encode(), token.logprob)


class TokenPlacer:
    """Finds which characters of the text each token stands for. A token may have only some bytes
    of a character.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = 0

    def place(self, tokens: Sequence[TokenText] | None, text: str) -> list[PlacedToken]:
        """Find the positions of `tokens` in the whole text. `text` arrived with them. It may lack
        characters of the last tokens, which arrive later.
        """
        placed = []
        for token in tokens or ():
            characters = self._decoder.decode(token.token_bytes)
            if self._end == 0 and characters.startswith(" ") and text[:1] not in ("", " "):
                characters = characters[1:]  # a tokenizer's word-start mark is not text
            start, self._end = self._end, self._end + len(characters)
            placed.append(PlacedToken(token, start, self._end))
        return placed


class FilteredText:
    """Passes text and tokens through a filter. They are held back until the filter says that the
    text is final.
    """

    def __init__(self, text_filter: TextFilter) -> None:
        self.text_filter = text_filter
        self.pending = ""
        self._base = 0  # where `pending` starts in the whole text
        self._tokens: deque[PlacedToken] = deque()
        self._trail = Trail()

    def add(self, text: str, tokens: Sequence[PlacedToken]) -> None:
        self.pending += text
        self._tokens.extend(tokens)

    def settle(self, filtered: Filtered, is_last: bool) -> tuple[str, list[PlacedToken]]:
        settled, edits = filtered
        source = self.pending
        self.pending = source[settled:]
        text = _mended(source[:settled], 0, edits)
        self._trail.add(source[:settled], [_moved(edit, self._base) for edit in edits])
        self._base += settled
        tokens = []
        while self._tokens and (is_last or self._tokens[0].end <= self._base):
            tokens.append(self._trail.placed(self._tokens.popleft()))
        self._trail.forget(self._tokens[0].start if self._tokens else None)
        return text, tokens

    def release(self) -> tuple[str, list[PlacedToken]]:
        """Return all held text and tokens, unchanged."""
        return self.settle(Filtered(len(self.pending)), is_last=True)


class Trail:
    """The last part of the final text, with its edits. It is kept because a token may arrive after
    its text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._start = 0  # where `_text` starts in the whole text, before edits
        self._written = 0  # where `_text` starts in the edited text
        self._edits: list[Edit] = []
        self._is_aligned = True

    def add(self, text: str, edits: Sequence[Edit]) -> None:
        self._text += text
        self._edits += edits

    def forget(self, before: int | None) -> None:
        """Drop text and edits that a token which starts at `before` does not need. If `before` is
        None, no token waits, and all text is dropped.
        """
        end = self._start + len(self._text)
        cut = end if before is None else max(min(before, end), self._start)
        cut = min([cut, *(edit.start for edit in self._edits if edit.start < cut < edit.end)])
        gone = [edit for edit in self._edits if edit.end <= cut]
        self._written += len(_mended(self._text[: cut - self._start], self._start, gone))
        self._edits = self._edits[len(gone) :]
        self._text = self._text[cut - self._start :]
        self._start = cut

    def placed(self, token: PlacedToken) -> PlacedToken:
        """The token as the edited text shows it. If its place is unknown, its text is hidden."""
        unknown = PlacedToken(hidden(token.shown), None, token.end)
        if token.start is None or not self._is_aligned:
            return unknown
        start, end = token.start, token.end
        if start < self._start or end > self._start + len(self._text):
            return unknown  # the token's text was removed with a stop string
        raw = self._text[start - self._start : end - self._start]
        if raw and not _spells(token.shown, raw):
            self._is_aligned = False
            return unknown
        before = [edit for edit in self._edits if edit.start < start]
        new_start = self._written + len(
            _mended(self._text[: start - self._start], self._start, before)
        )
        touched = [
            each for each in self._edits if each.start < max(end, start + 1) and start < each.end
        ]
        if not touched:
            return PlacedToken(token.shown, new_start, new_start + len(raw))
        text = _mended(raw, start, touched)
        return PlacedToken(hidden(token.shown, text), new_start, new_start + len(text))


def _spells(token: TokenText, raw: str) -> bool:
    """Whether the token's bytes spell `raw`, which are its characters in the text. Bytes of
    characters that the token has only in part are not compared.
    """
    literal = token.token_bytes.decode("utf-8", "replace").lstrip("\ufffd")
    return literal.endswith(raw) or raw.endswith(literal.rstrip("\ufffd"))


def _moved(edit: Edit, distance: int) -> Edit:
    return Edit(edit.start + distance, edit.end + distance, edit.text)


def _mended(raw: str, start: int, edits: Sequence[Edit]) -> str:
    """`raw` with the edits applied. `start` is the position of `raw` in the whole text. If `raw`
    begins inside an edit, the replacement is not part of the result.
    """
    pieces: list[str] = []
    position = 0
    for edit in edits:
        first, last = max(edit.start - start, 0), min(edit.end - start, len(raw))
        pieces.append(raw[position:first])
        if edit.start >= start:
            pieces.append(edit.text)
        position = max(last, position)
    return "".join(pieces) + raw[position:]


def mistake_in(filtered: Any, num_pending: int, is_last: bool) -> str | None:
    """Why a filter's result is invalid. None if it is valid."""
    try:
        made = msgspec.convert(filtered, tuple[int, list[tuple[int, int, str]]])
    except msgspec.ValidationError:
        return "a filter must return Filtered(settled, edits)"
    settled, edits = made
    if not 0 <= settled <= num_pending:
        return "a filter settled more than there is"
    if is_last and settled < num_pending:
        return "a filter left text unsettled at the end"
    position = 0
    for start, end, _ in edits:
        if not position <= start <= end <= settled:
            return "a filter's edits must be in order, apart, and within what is settled"
        position = end
    return None
