"""Prints the Markdown of an answer on a terminal while it arrives.

Lines are wrapped between words. A word is printed when it is complete, so a word is never broken.
Bold text, code, headings, lists and quotes are styled. Code blocks are neither wrapped nor
interpreted.
"""

import re
from collections.abc import Callable

_BOLD, _CODE, _DIM, _RESET = "\x1b[1m", "\x1b[36m", "\x1b[2m", "\x1b[0m"
_WORDS = re.compile(r"\n|[^\S\n]+|\S+")
_MARKS = re.compile(r"(\*\*|`)")


class MarkdownPrinter:
    """Prints one answer. Call `feed` with each piece of text, and `close` at the end. Without
    `styled`, the text is only wrapped.
    """

    def __init__(
        self, write: Callable[[str], object], width: int, *, styled: bool, column: int = 0
    ) -> None:
        self._write = write
        self._width = max(20, width)
        self._styled = styled
        self._column = column  # where the next character is printed
        self._pending = ""  # text that may be part of an incomplete word
        self._space = ""  # spaces before the next word of the line
        self._indent = 0  # columns before wrapped parts of a list item
        self._starts_line = True
        self._in_block = self._heading = self._bold = self._code = False

    def feed(self, text: str) -> None:
        self._pending += "".join(each for each in text if each.isprintable() or each in "\n\t")
        pieces = _WORDS.findall(self._pending)
        # The last word may go on in the next piece of text.
        self._pending = pieces.pop() if pieces and not pieces[-1].isspace() else ""
        for piece in pieces:
            self._print(piece)

    def close(self) -> None:
        pending, self._pending = self._pending, ""
        if pending:
            self._print(pending)
        if self._styled:
            self._write(_RESET)

    def _print(self, piece: str) -> None:
        if piece == "\n":
            self._end_line()
        elif self._in_block and not (self._starts_line and piece.startswith("```")):
            self._put(piece)
            self._starts_line = False
        elif piece.isspace():
            self._space = piece
        else:
            word = self._line_start(piece) if self._starts_line else piece
            self._starts_line = False
            if word:
                self._put_word(word)

    def _end_line(self) -> None:
        if self._styled and not self._in_block:
            self._write(_RESET)
            self._bold = self._code = False
        self._write("\n")
        self._column = self._indent = 0
        self._space = ""
        self._heading, self._starts_line = False, True

    def _line_start(self, word: str) -> str:
        """Interpret the first word of a line. Returns what to print in its place."""
        if word.startswith("```"):
            self._in_block = not self._in_block
            if self._styled:
                self._write(_CODE if self._in_block else _RESET)
            return word
        if word in ("-", "*", "+") or re.fullmatch(r"\d{1,3}[.)]", word):
            self._indent = len(self._space) + len(word) + 1
            return "•" if self._styled and word in "-*+" else word
        if self._styled and re.fullmatch(r"#{1,6}", word):
            self._heading = True
            self._write(_BOLD)
            return ""
        if self._styled and word == ">":
            self._indent = 2
            self._write(_DIM)
            return "│"
        return word

    def _put_word(self, word: str) -> None:
        shown = _MARKS.sub("", word) if self._styled and not self._in_block else word
        if self._column + len(self._space) + len(shown) > self._width and self._column:
            self._write("\n" + " " * self._indent)
            self._column = self._indent
        else:
            # A heading starts at the margin: the space after its hashes is left out.
            self._put("" if self._heading and not self._column else self._space)
        self._space = ""
        if shown == word:
            self._put(word)
        else:
            for part in _MARKS.split(word):
                self._put_part(part)

    def _put_part(self, part: str) -> None:
        if part == "`":
            self._code = not self._code
            self._restyle()
        elif part == "**" and not self._code:
            self._bold = not self._bold
            self._restyle()
        else:
            self._put(part)

    def _restyle(self) -> None:
        bold = _BOLD if self._bold or self._heading else ""
        self._write(_RESET + bold + (_CODE if self._code else ""))

    def _put(self, text: str) -> None:
        self._write(text)
        self._column += len(text)
