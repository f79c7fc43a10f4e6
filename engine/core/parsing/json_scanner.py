"""An incremental JSON validator, for text that arrives in parts.

The scanner does not build values. It only says how far the text is valid, so that the arguments of
a tool call can be streamed. It visits every character once. In memory, it keeps one character per
open bracket.
"""

import re

# Values that are nested deeper are refused: such output is noise, or an attack on the client.
MAX_DEPTH = 64

_SPACES = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_DIGITS = re.compile(r"[0-9]*")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrtu')
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
# Number parser: state -> {kind of the next character: next state}. A state names what was read
# last. "zero" is a leading 0. "whole" is another digit of the integer part. "fraction" and
# "exponent" are digits of these parts.
_NUMBER = {
    "-": {"0": "zero", "digit": "whole"},
    "zero": {".": "point", "e": "e"},
    "whole": {"0": "whole", "digit": "whole", ".": "point", "e": "e"},
    "point": {"0": "fraction", "digit": "fraction"},
    "fraction": {"0": "fraction", "digit": "fraction", "e": "e"},
    "e": {"0": "exponent", "digit": "exponent", "sign": "sign"},
    "sign": {"0": "exponent", "digit": "exponent"},
    "exponent": {"0": "exponent", "digit": "exponent"},
}
_NUMBER_ENDS = frozenset({"zero", "whole", "fraction", "exponent"})
_RUNS = frozenset({"whole", "fraction", "exponent"})


class JsonScanner:
    """Validates one JSON value. `feed` stops after the last character of the value, or at the first
    invalid character.
    """

    def __init__(self, depth: int = 0) -> None:
        """`depth` is the number of objects and arrays around the value."""
        self.done = False
        self._depth = depth
        self.bad = False
        self._closers: list[str] = []  # closing brackets of the open objects and arrays
        # What comes next. "value": a value. "item": a value or "]". "key": a key or "}".
        # "next_key": a key. "colon": ":". "next": "," or a closing bracket. "string", "number",
        # "literal": more of such a value.
        self._expects = "value"
        self._is_key = False
        self._escape = ""  # unfinished escape sequence of a string
        self._number = ""
        self._literal = ""  # remaining characters of true, false or null

    @property
    def open(self) -> bool:
        return not (self.done or self.bad)

    def feed(self, text: str, start: int, end: int) -> int:
        """Validate `text[start:end]` as the next part of the value. Returns the index of the first
        character that is not part of the value, or `end`.
        """
        position = start
        while position < end and self.open:
            if self._expects == "string":
                position = self._string(text, position, end)
            elif self._expects == "number":
                position = self._digits(text, position, end)
            elif self._expects == "literal":
                position = self._word(text, position)
            else:
                position = self._structure(text, position, end)
        return position

    def _structure(self, text: str, position: int, end: int) -> int:
        position = _run_end(_SPACES, text, position, end)
        if position == end:
            return position
        char, expects = text[position], self._expects
        if expects in ("value", "item"):
            if char == "]" and expects == "item":
                return self._close(position)
            return self._begin(char, position)
        if expects in ("key", "next_key") and char == '"':
            self._expects, self._is_key = "string", True
        elif expects == "colon" and char == ":":
            self._expects = "value"
        elif expects == "next" and char == ",":
            self._expects = "next_key" if self._closers[-1] == "}" else "value"
        elif expects in ("key", "next") and char == self._closers[-1]:
            return self._close(position)
        else:
            return self._fail(position)
        return position + 1

    def _begin(self, char: str, position: int) -> int:
        if char in "{[":
            if self._depth + len(self._closers) == MAX_DEPTH:
                return self._fail(position)
            self._closers.append("}" if char == "{" else "]")
            self._expects = "key" if char == "{" else "item"
        elif char == '"':
            self._expects, self._is_key = "string", False
        elif char == "-":
            self._expects, self._number = "number", "-"
        elif char in "0123456789":
            self._expects, self._number = "number", "zero" if char == "0" else "whole"
        elif char in _LITERALS:
            self._expects, self._literal = "literal", _LITERALS[char]
        else:
            return self._fail(position)
        return position + 1

    def _string(self, text: str, position: int, end: int) -> int:
        if self._escape:
            return self._escaped(text[position], position)
        position = _run_end(_PLAIN, text, position, end)
        if position == end:
            return position
        if text[position] == "\\":
            self._escape = "\\"
        elif text[position] == '"':
            self._end_string()
        else:
            return self._fail(position)
        return position + 1

    def _escaped(self, char: str, position: int) -> int:
        allowed = _ESCAPED if len(self._escape) == 1 else _HEX
        if char not in allowed:
            return self._fail(position)
        self._escape += char
        if self._escape[1] != "u" or len(self._escape) == 6:
            self._escape = ""
        return position + 1

    def _end_string(self) -> None:
        if self._is_key:
            self._expects = "colon"
        else:
            self._end_value()

    def _digits(self, text: str, position: int, end: int) -> int:
        char = text[position]
        kind = char if char in "0." else "e" if char in "eE" else "sign" if char in "+-" else ""
        if char in "123456789":
            kind = "digit"
        follows = _NUMBER[self._number].get(kind)
        if follows is None:
            if self._number not in _NUMBER_ENDS:
                return self._fail(position)
            self._end_value()  # the number ended before this character
            return position
        self._number = follows
        return _run_end(_DIGITS, text, position + 1, end) if follows in _RUNS else position + 1

    def _word(self, text: str, position: int) -> int:
        if text[position] != self._literal[0]:
            return self._fail(position)
        self._literal = self._literal[1:]
        if not self._literal:
            self._end_value()
        return position + 1

    def _close(self, position: int) -> int:
        self._closers.pop()
        self._end_value()
        return position + 1

    def _end_value(self) -> None:
        self._expects = "next"
        self.done = not self._closers

    def _fail(self, position: int) -> int:
        self.bad = True
        return position


def is_object(text: str) -> bool:
    """Whether the whole text is one JSON object, surrounded only by whitespace."""
    scanner = JsonScanner()
    end = scanner.feed(text, 0, len(text))
    return scanner.done and text.lstrip(" \t\n\r")[:1] == "{" and not text[end:].strip(" \t\n\r")


def _run_end(pattern: re.Pattern[str], text: str, start: int, end: int) -> int:
    match = pattern.match(text, start, end)
    return match.end() if match else start
