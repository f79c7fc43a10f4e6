"""The input buffer and output list of a parser.

Parsers are generators. They read from a `Source` and yield when they need more text. Text that was
read is held until it is clear what it is. Then `release` emits it as text, or `discard` drops it as
syntax of a call. When a parser yields, the unread text is shorter than the longest marker. So the
total time is linear in the length of the text.
"""

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

from engine.core.parsing.json_scanner import JsonScanner
from engine.core.parsing.pieces import Piece, ReasoningPiece, TextPiece

Result = TypeVar("Result")
Steps = Generator[None, None, Result]

_SPACE = re.compile(r"[ \t\n\r]*")
_WORD = re.compile(r"[A-Za-z0-9_.\-]*")


class NotACall(Exception):
    """The text is not a tool call, or is no valid call from here on. The exception is always caught
    inside this package.
    """


class Source:
    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._ended = False
        self._held: list[str] = []
        self._pieces: list[Piece] = []
        self._spoken: list[str] = []  # text or reasoning not yet emitted as a piece
        self.in_reasoning = False  # whether text that is emitted now is reasoning

    def push(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        self._ended = True

    def take_pieces(self) -> list[Piece]:
        self._finish_spoken()
        pieces, self._pieces = self._pieces, []
        return pieces

    @property
    def num_unread(self) -> int:
        return len(self._text) - self._position

    @property
    def is_over(self) -> bool:
        """Whether all input has arrived and been read."""
        return self._ended and not self.num_unread

    # Methods that hold text which was read, and methods that emit or drop held text.

    def take(self, count: int) -> None:
        """Read and hold `count` characters that `peek` or `starts_with` has seen."""
        self._hold_to(self._position + count)

    def hold(self, text: str) -> None:
        self._held.append(text)

    def release(self) -> None:
        self._spoken += self._held
        self._held = []

    def discard(self) -> None:
        self._held = []

    def holds_only_space(self) -> bool:
        return all(not part or part.isspace() for part in self._held)

    def emit(self, piece: Piece) -> None:
        self._finish_spoken()
        self._pieces.append(piece)

    def reason(self, inside: bool) -> None:
        """Mark the text that follows as reasoning if `inside` is true, else as normal text."""
        self._finish_spoken()
        self.in_reasoning = inside

    # The following methods are generators. They yield until enough text has arrived.

    def peek(self) -> Steps[str]:
        """The next character, which stays unread; an empty string at the end of the input."""
        while not self.num_unread and not self._ended:
            yield
        return self._text[self._position : self._position + 1]

    def starts_with(self, literal: str) -> Steps[bool]:
        while not self._ended:
            seen = self._text[self._position : self._position + len(literal)]
            if len(seen) == len(literal) or not literal.startswith(seen):
                break
            yield
        return self._text.startswith(literal, self._position)

    def skip_space(self) -> Steps[str]:
        """Read and hold whitespace. Returns the next character, which stays unread; an empty string
        at the end of the input.
        """
        while True:
            self._hold_run(_SPACE, len(self._text))
            if self.num_unread or self._ended:
                return self._text[self._position : self._position + 1]
            yield

    def word(self, max_chars: int, pattern: re.Pattern[str] = _WORD) -> Steps[str]:
        """Read and hold a name of up to `max_chars` characters."""
        first = len(self._held)
        left = max_chars
        while True:
            num_before = self.num_unread
            self._hold_run(pattern, self._position + left)
            left -= num_before - self.num_unread
            if not left or self.num_unread or self._ended:
                return "".join(self._held[first:])
            yield

    def scan(self, scanner: JsonScanner, max_chars: int | None = None) -> Steps[str]:
        """Read up to `max_chars` characters that continue the scanner's JSON value. Returns these
        characters; they are not held.
        """
        if not (yield from self.peek()):
            raise NotACall
        end = len(self._text)
        if max_chars is not None:
            end = min(end, self._position + max_chars)
        start, self._position = self._position, scanner.feed(self._text, self._position, end)
        return self._text[start : self._position]

    def text_until(self, *markers: str) -> Steps[str]:
        """Emit text up to the first of `markers`, which stays unread. Returns the marker, or "" if
        the text ends first. If two markers begin at one place, the longer one is found.
        """
        while True:
            end, found = self._first(markers)
            self._speak_to(end)
            if found or self._ended:
                return found
            yield

    def raw_until(self, *markers: str) -> Steps[tuple[str, str]]:
        """Read text up to the first of `markers`, and leave the marker unread. Text is returned as
        soon as it arrives, so this may return before a marker is reached. Returns (text, marker).
        The marker is "" if it was not reached yet. Raises `NotACall` if the output ends first.
        """
        while True:
            end, found = self._first(markers)
            if found or end > self._position:
                text, self._position = self._text[self._position : end], end
                return text, found
            if self._ended:
                raise NotACall
            yield

    def expect(self, text: str) -> Steps[bool]:
        """Read and hold the words of `text`, with any whitespace around them. Stops and returns
        False at the first word that does not come next.
        """
        for word in text.split():
            yield from self.skip_space()
            if not (yield from self.starts_with(word)):
                return False
            self.take(len(word))
        return True

    def available(self) -> Steps[str]:
        """Read and hold all text that has arrived. Returns "" when the text has ended."""
        if not (yield from self.peek()):
            return ""
        self._hold_to(len(self._text))
        return self._held[-1]

    def unread(self, num_chars: int) -> None:
        """Emit the first `num_chars` of the held text. The rest is read again."""
        held = "".join(self._held)
        self._held = [held[:num_chars]]
        self.release()
        self._text, self._position = held[num_chars:] + self._text[self._position :], 0

    def rest(self) -> Steps[None]:
        """Emit all remaining text."""
        while True:
            self._speak_to(len(self._text))
            if self._ended:
                return
            yield

    def _hold_run(self, pattern: re.Pattern[str], end: int) -> None:
        match = pattern.match(self._text, self._position, end)
        if match and match.end() > self._position:
            self._hold_to(match.end())

    def _hold_to(self, end: int) -> None:
        self._held.append(self._text[self._position : end])
        self._position = end

    def _speak_to(self, end: int) -> None:
        if end > self._position:
            self.release()
            self._spoken.append(self._text[self._position : end])
            self._position = end

    def _first(self, markers: Sequence[str]) -> tuple[int, str]:
        """The place and text of the first marker. If more input must decide what begins at a
        place, this place and "".
        """
        undecided = len(self._text)
        if not self._ended:
            undecided -= self._possible_start(markers)
        found = [(self._text.find(marker, self._position), marker) for marker in markers]
        found = [each for each in found if 0 <= each[0] < undecided]
        if not found:
            return undecided, ""
        start = min(place for place, _ in found)
        return start, max((each for place, each in found if place == start), key=len)

    def _possible_start(self, markers: Sequence[str]) -> int:
        """Length of the longest unread suffix that a marker begins with and goes beyond."""
        longest = min(max(map(len, markers), default=1) - 1, self.num_unread)
        for size in range(longest, 0, -1):
            tail = self._text[len(self._text) - size :]
            if any(len(marker) > size and marker.startswith(tail) for marker in markers):
                return size
        return 0

    def _finish_spoken(self) -> None:
        text = "".join(self._spoken)
        self._spoken = []
        if text:
            self._pieces.append(ReasoningPiece(text) if self.in_reasoning else TextPiece(text))
