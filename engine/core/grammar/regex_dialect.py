r"""Translates clients' regular expressions to the syntax of llguidance.

A pattern is parsed in linear time, without Python's `re`. ECMAScript and Python disagree on some
character sets, such as `\w`, `\s` and `.`. Such a set is replaced by the characters that belong to
it in both dialects, so that the output matches the client's pattern in both. Properties of
characters, such as `\p{L}`, are those of ECMAScript's Unicode patterns. Lookaround, backreferences
and flags are refused.
"""

MAX_NESTING = 100
MAX_REPEAT = 100_000
MAX_BOUNDS_CHARS = 64  # max length of {n,m}, counting the braces
MAX_PROPERTY_CHARS = 64  # max length of the name in \p{name}

# Name of a set, such as d for \d -> two bodies of a character class. The first body has the
# characters that belong to the set in all dialects. The second has those that belong to it in at
# least one dialect; it is used in negated classes.
_WORDS = r"\p{L}\p{N}\p{M}\p{Pc}"
_SPACES = r" \t\n\r\f\x0B\p{Zs}"
_MAYBE_SPACES = r"\s\x1C-\x1F\x{85}\x{FEFF}\x{2028}\x{2029}"
_SETS = {
    "d": ("0-9", r"\p{Nd}"),
    "D": (r"\P{Nd}", "[^0-9]"),
    "w": ("0-9A-Za-z_", _WORDS),
    "W": (f"[^{_WORDS}]", "[^0-9A-Za-z_]"),
    "s": (_SPACES, _MAYBE_SPACES),
    "S": (f"[^{_MAYBE_SPACES}]", f"[^{_SPACES}]"),
}
# The general categories of Unicode that \p{name} takes, and their long names. A surrogate (Cs) is
# no character of a text.
_CATEGORIES = {
    **{"L": "Letter", "LC": "Cased_Letter", "Lu": "Uppercase_Letter", "Ll": "Lowercase_Letter"},
    **{"Lt": "Titlecase_Letter", "Lm": "Modifier_Letter", "Lo": "Other_Letter"},
    **{"M": "Mark", "Mn": "Nonspacing_Mark", "Mc": "Spacing_Mark", "Me": "Enclosing_Mark"},
    **{"N": "Number", "Nd": "Decimal_Number", "Nl": "Letter_Number", "No": "Other_Number"},
    **{"P": "Punctuation", "Pc": "Connector_Punctuation", "Pd": "Dash_Punctuation"},
    **{"Ps": "Open_Punctuation", "Pe": "Close_Punctuation", "Pi": "Initial_Punctuation"},
    **{"Pf": "Final_Punctuation", "Po": "Other_Punctuation"},
    **{"S": "Symbol", "Sm": "Math_Symbol", "Sc": "Currency_Symbol", "Sk": "Modifier_Symbol"},
    **{"So": "Other_Symbol", "Z": "Separator", "Zs": "Space_Separator", "Zl": "Line_Separator"},
    **{"Zp": "Paragraph_Separator", "C": "Other", "Cc": "Control", "Cf": "Format"},
    **{"Co": "Private_Use", "Cn": "Unassigned"},
}
_PROPERTIES = frozenset(
    {*_CATEGORIES, *_CATEGORIES.values(), "Any", "ASCII", "Alphabetic", "Lowercase", "Uppercase"}
    | {"White_Space", "ID_Start", "ID_Continue", "Emoji", "Ideographic"}
)
_CATEGORY_KEYS = ("gc=", "General_Category=")
_SCRIPT_KEYS = ("sc=", "Script=", "scx=", "Script_Extensions=")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_NOT_LINE_ENDS = r"\n\r\x{2028}\x{2029}"
# Characters that JSON can only write as \uXXXX, and DEL. The output grammars admit none of them.
UNWRITABLE = r"\x00-\x07\x0B\x0E-\x1F\x7F"
_ANY_CHAR = f"[^{UNWRITABLE}]"
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = frozenset("0123456789")


class RegexError(ValueError):
    """A regular expression is invalid or not supported. The message says why."""


def literal(char: str) -> str:
    """A regular expression that matches only the character `char`."""
    if char.isascii() and (char.isalnum() or char in " _"):
        return char
    return f"\\x{{{ord(char):X}}}"


def translate(pattern: str, *, in_json: bool) -> str:
    """Translate `pattern` to llguidance's syntax. If `in_json` is true, the pattern is for the
    value of a JSON string: it then never matches the characters in `UNWRITABLE`.
    """
    return _Translation(pattern, in_json).run()


def any_text(least: int, most: int | None) -> str:
    """An expression for all JSON strings of these lengths."""
    return f"^{_ANY_CHAR}{{{least},{'' if most is None else most}}}$"


def admits_many_texts(expression: str) -> bool:
    """Whether a translated expression is known to match more texts than a schema can list. False if
    that is not certain.
    """
    if expression.startswith(f"^{_ANY_CHAR}{{") and expression != any_text(0, 0):
        return True
    # After this replacement, each "^" is an anchor. Literal characters such as "^" and "*" don't
    # occur, because they are written as hexadecimal escapes.
    bare = expression.replace("[^", "[")
    is_repeating = any(sign in bare for sign in ("*", "+", ",}"))
    return is_repeating or "^" not in bare or "$" not in bare


def _property(spelled: str) -> str:
    """The property of characters that a client wrote in the braces after p, in llguidance's
    syntax.
    """
    for key in _CATEGORY_KEYS:
        if spelled.startswith(key) and spelled.removeprefix(key) in _PROPERTIES:
            return spelled.removeprefix(key)
    for key in _SCRIPT_KEYS:
        if spelled.startswith(key) and spelled.removeprefix(key).replace("_", "").isalpha():
            return spelled
    if spelled not in _PROPERTIES:
        raise RegexError(
            f"'\\p{{{spelled}}}' is not supported; write a general category such as L or Nd, or a "
            "script, as in \\p{Script=Greek}"
        )
    return spelled


class _Translation:
    """Translates a pattern in one pass from left to right."""

    def __init__(self, pattern: str, in_json: bool) -> None:
        self._pattern = pattern
        self._in_json = in_json
        self._at = 0
        self._output: list[str] = []

    def run(self) -> str:
        depth = 0
        repeatable = False
        while self._at < len(self._pattern):
            char = self._pattern[self._at]
            if char in "*+?{" and (char != "{" or self._at_bounds()):
                if not repeatable:
                    raise RegexError(f"there is nothing that '{char}' could repeat")
                self._quantifier()
                repeatable = False
                continue
            self._at += 1
            repeatable = char not in "(|^$"
            if char == "(":
                depth += 1
                self._open_group(depth)
            elif char == ")":
                depth -= 1
                if depth < 0:
                    raise RegexError("there is a ')' without its '('")
                self._output.append(")")
            elif char in "|^$":
                self._output.append(char)
            else:
                self._output.append(self._atom(char))
        if depth:
            raise RegexError("there is a '(' without its ')'")
        return "".join(self._output)

    def _atom(self, char: str) -> str:
        if char == ".":
            return self._class(negated=True, body=_NOT_LINE_ENDS)
        if char == "[":
            return self._bracket()
        if char == "\\":
            name = self._take()
            if (found := self._set(name, negated=False)) is not None:
                return self._class(negated=False, body=found)
            char = self._escaped(name, in_class=False)
        if self._in_json and (char < " " or char == "\x7f"):
            return self._class(negated=False, body=literal(char))
        return literal(char)

    def _class(self, *, negated: bool, body: str) -> str:
        if not self._in_json:
            return f"[^{body}]" if negated else f"[{body}]"
        return f"[^{body}{UNWRITABLE}]" if negated else f"[{body}&&[^{UNWRITABLE}]]"

    def _open_group(self, depth: int) -> None:
        if depth > MAX_NESTING:
            raise RegexError(f"its groups are nested deeper than {MAX_NESTING}")
        if self._peek() == "?":
            if self._pattern[self._at : self._at + 2] != "?:":
                raise RegexError(
                    "lookaround, flags and named groups are not supported; of the groups that "
                    "begin with '(?' only '(?:...)' is"
                )
            self._at += 2
        self._output.append("(?:")

    def _quantifier(self) -> None:
        char = self._take()
        bounds = self._bounds() if char == "{" else char
        self._output.append(bounds)
        if self._peek() == "?":  # lazy quantifiers match the same texts
            self._at += 1
        if self._peek() in ("*", "+", "?") or (self._peek() == "{" and self._at_bounds()):
            raise RegexError("a repetition cannot be repeated; put a group around it")

    def _at_bounds(self) -> bool:
        """Whether the brace at the current position starts {n}, {n,} or {n,m}. If not, the brace is
        a literal character.
        """
        end = self._pattern.find("}", self._at, self._at + MAX_BOUNDS_CHARS)
        parts = self._pattern[self._at + 1 : end].split(",") if end > 0 else []
        if len(parts) == 2 and not parts[0] and set(parts[1]) <= _DIGITS:
            raise RegexError("write {0,n} for {,n}")
        return 1 <= len(parts) <= 2 and bool(parts[0]) and set("".join(parts)) <= _DIGITS

    def _bounds(self) -> str:
        end = self._pattern.index("}", self._at)
        low, comma, high = self._pattern[self._at : end].partition(",")
        self._at = end + 1
        if max(len(low), len(high)) > len(str(MAX_REPEAT)) or int(high or low) > MAX_REPEAT:
            raise RegexError(f"it repeats something more often than {MAX_REPEAT} times")
        if high and int(low) > int(high):
            raise RegexError(f"the bounds {{{low},{high}}} are in the wrong order")
        return f"{{{int(low)}{comma}{int(high) if high else ''}}}"

    def _bracket(self) -> str:
        negated = self._peek() == "^"
        self._at += negated
        if self._peek() == "]":
            raise RegexError("a class of characters is empty; write \\] for the bracket itself")
        body = []
        while (char := self._take()) != "]":
            low = self._member(char, negated)
            is_range = self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] != "]"
            if not is_range:
                body.append(low if len(low) > 1 else literal(low))
                continue
            self._at += 1
            high = self._member(self._take(), negated)
            if len(low) > 1 or len(high) > 1 or low > high:
                raise RegexError("a range in a class of characters has no proper ends")
            body.append(f"{literal(low)}-{literal(high)}")
        return self._class(negated=negated, body="".join(body))

    def _member(self, char: str, negated: bool) -> str:
        """A member of a character class: one character, or the class body of a set such as
        `\\d`.
        """
        if char != "\\":
            return char
        name = self._take()
        found = self._set(name, negated)
        return found if found is not None else self._escaped(name, in_class=True)

    def _set(self, name: str, negated: bool) -> str | None:
        """The class body of the set whose escape begins with `name`. None if the escape is that of
        one character.
        """
        if name in _SETS:
            return _SETS[name][negated]
        if name not in ("p", "P"):
            return None
        end = self._pattern.find("}", self._at, self._at + MAX_PROPERTY_CHARS)
        if self._peek() != "{" or end < 0:
            raise RegexError(f"write a property of characters as \\{name}{{L}}")
        spelled = self._pattern[self._at + 1 : end]
        self._at = end + 1
        return f"\\{name}{{{_property(spelled)}}}"

    def _escaped(self, name: str, in_class: bool) -> str:
        if name in _CONTROLS:
            return _CONTROLS[name]
        if name in ("x", "u"):
            return self._code_point(2 if name == "x" else 4)
        if name == "0" and self._peek() not in _DIGITS:
            return "\0"
        if name == "b" and in_class:
            return "\b"
        if name.isalnum():
            raise RegexError(f"'\\{name}' is not supported")
        return name

    def _code_point(self, num_digits: int) -> str:
        digits = self._pattern[self._at : self._at + num_digits]
        self._at += num_digits
        if len(digits) < num_digits or not set(digits) <= _HEX:
            raise RegexError(f"an escape needs {num_digits} hexadecimal digits")
        char = chr(int(digits, 16))
        if "\ud800" <= char <= "\udfff":
            raise RegexError("write a character beyond U+FFFF as itself, not as two surrogates")
        return char

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        if self._at >= len(self._pattern):
            raise RegexError("it ends in the middle of an escape or of a class of characters")
        self._at += 1
        return self._pattern[self._at - 1]
