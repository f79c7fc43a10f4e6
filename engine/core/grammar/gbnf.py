"""Converts GBNF, llama.cpp's grammar language, to Lark for llguidance.

Each rule that is not recursive becomes one terminal, and so does each non-recursive part of a
recursive rule. The lexer matches terminals, which makes token masks cheap to compute. In
llguidance, a terminal matches as much text as it can. So in a client's grammar, a recursive rule
should not start with text that could continue the terminal before it.
"""

from collections.abc import Iterator
from typing import NoReturn

import msgspec

from engine.core.grammar.regex_dialect import MAX_REPEAT, literal

MAX_NESTING = 100
ROOT = "root"
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class GbnfError(ValueError):
    """A grammar is invalid. The message says why, and in which line."""


def is_gbnf(source: str) -> bool:
    """Whether a grammar is GBNF and not Lark. In GBNF, some line starts with `root ::=`."""
    lines = (line.lstrip() for line in source.splitlines())
    return any(
        line.startswith(ROOT) and line[len(ROOT) :].lstrip().startswith("::=") for line in lines
    )


def gbnf_to_lark(source: str) -> str:
    rules = _Parser(source).rules()
    return "\n".join(_Writer(rules).lines())


class _Text(msgspec.Struct, frozen=True):
    """A regular expression for literal text or for a character class."""

    expression: str


class _Name(msgspec.Struct, frozen=True):
    name: str


class _Repeat(msgspec.Struct, frozen=True):
    node: "_Expression"
    low: int
    high: int | None


class _Sequence(msgspec.Struct, frozen=True):
    nodes: tuple["_Expression", ...]


class _Choice(msgspec.Struct, frozen=True):
    nodes: tuple["_Expression", ...]


_Expression = _Text | _Name | _Repeat | _Sequence | _Choice


class _Parser:
    """A recursive descent parser for GBNF. Only groups in parentheses recurse, to a limited
    depth.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0

    def rules(self) -> dict[str, _Expression]:
        rules: dict[str, _Expression] = {}
        self._skip(newlines=True)
        while self._peek():
            name = self._name()
            self._skip(newlines=False)
            if not self._source.startswith("::=", self._at):
                self._fail(f"'::=' is missing after '{name}'")
            self._at += 3
            if name in rules:
                self._fail(f"rule '{name}' is defined twice")
            self._skip(newlines=True)
            rules[name] = self._choice(depth=0)
            self._skip(newlines=True)
        if ROOT not in rules:
            self._fail("there is no rule 'root'")
        return rules

    def _choice(self, depth: int) -> _Expression:
        options = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            self._skip(newlines=True)
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _sequence(self, depth: int) -> _Expression:
        nodes: list[_Expression] = []
        while (char := self._peek()) and char not in "|)\r\n":
            if char in "*+?{":
                if not nodes:
                    self._fail(f"there is nothing that '{char}' could repeat")
                nodes.append(self._repeat(nodes.pop()))
            else:
                nodes.append(self._atom(char, depth))
            self._skip(newlines=depth > 0)
        return nodes[0] if len(nodes) == 1 else _Sequence(tuple(nodes))

    def _atom(self, char: str, depth: int) -> _Expression:
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == ".":
            self._at += 1
            return _Text("(?s:.)")
        if char != "(":
            return _Name(self._name())
        if depth >= MAX_NESTING:
            self._fail(f"groups are nested deeper than {MAX_NESTING}")
        self._at += 1
        self._skip(newlines=True)
        inside = self._choice(depth + 1)
        if self._peek() != ")":
            self._fail("a ')' is missing")
        self._at += 1
        return inside

    def _repeat(self, node: _Expression) -> _Expression:
        char = self._take()
        if char != "{":
            return _Repeat(node, *_REPEATS[char])
        end = self._source.find("}", self._at, self._at + 32)
        low, comma, high = (part.strip() for part in self._source[self._at : end].partition(","))
        if end < 0 or not low.isdecimal() or not (high.isdecimal() or not high):
            self._fail("a repetition is {n}, {n,} or {n,m}")
        self._at = end + 1
        most = int(high) if high else (None if comma else int(low))
        if max(int(low), most or 0) > MAX_REPEAT or (most is not None and most < int(low)):
            self._fail(f"the bounds of a repetition must be in order, up to {MAX_REPEAT}")
        return _Repeat(node, int(low), most)

    def _literal(self) -> _Text:
        self._at += 1
        chars = []
        while (char := self._take()) != '"':
            if char in "\r\n":
                self._fail("a literal has no end")
            chars.append(literal(self._escaped() if char == "\\" else char))
        return _Text("".join(chars))

    def _class(self) -> _Text:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        body = []
        while (char := self._take()) != "]":
            low = self._escaped() if char == "\\" else char
            high = low
            if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                char = self._take()
                high = self._escaped() if char == "\\" else char
            if high < low:
                self._fail("a range of characters is in the wrong order")
            body.append(f"{literal(low)}-{literal(high)}")
        if not body:
            self._fail("a class of characters is empty")
        return _Text(f"[{'^' * negated}{''.join(body)}]")

    def _escaped(self) -> str:
        name = self._take()
        if name in _ESCAPES:
            return _ESCAPES[name]
        digits = self._source[self._at : self._at + _HEX_ESCAPES.get(name, 0)]
        if not digits or len(digits) < _HEX_ESCAPES[name] or not set(digits) <= _HEX:
            self._fail(f"'\\{name}' is not an escape")
        self._at += len(digits)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            self._fail("an escape names no character")
        return chr(code)

    def _name(self) -> str:
        start = self._at
        while (char := self._peek()) and (char.isascii() and (char.isalnum() or char in "-_")):
            self._at += 1
        if self._at == start:
            self._fail(f"there is an unexpected {self._peek() or 'end'!r}")
        return self._source[start : self._at]

    def _skip(self, newlines: bool) -> None:
        """Skip blanks and comments. If `newlines` is true, line ends are skipped too."""
        while char := self._peek():
            if char == "#":
                end = self._source.find("\n", self._at)
                self._at = len(self._source) if end < 0 else end
            elif char in " \t" or (newlines and char in "\r\n"):
                self._at += 1
            else:
                return

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _take(self) -> str:
        if self._at >= len(self._source):
            self._fail("it ends too early")
        self._at += 1
        return self._source[self._at - 1]

    def _fail(self, problem: str) -> NoReturn:
        line = self._source.count("\n", 0, self._at) + 1
        raise GbnfError(f"line {line}: {problem}")


class _Writer:
    """Writes rules as Lark. Recursive rules are named `t0`, `t1` and so on. Other rules are
    terminals, named `T0`, `T1` and so on.
    """

    def __init__(self, rules: dict[str, _Expression]) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._terminals = self._find_terminals()
        self._is_terminal: dict[int, bool] = {}  # id() of an expression -> whether it is a terminal
        self._lines: list[str] = []
        self._num_parts = 0
        for rule in rules.values():
            self._classify(rule)

    def lines(self) -> list[str]:
        for name, rule in self._rules.items():
            expression = self._terminal(rule) if name in self._terminals else self._rule(rule)
            self._lines.append(f"{self._symbol(name)}: {expression}")
        return [f"start: {self._symbol(ROOT)}", *self._lines]

    def _find_terminals(self) -> set[str]:
        """Names of rules that are not recursive and use no recursive rule."""
        waits_for: dict[str, set[str]] = {}
        users: dict[str, list[str]] = {name: [] for name in self._rules}
        for name, rule in self._rules.items():
            waits_for[name] = set(_names(rule))
            for used in waits_for[name]:
                if used not in users:
                    raise GbnfError(f"rule '{used}' is used in '{name}' but not defined")
                users[used].append(name)
        ready = [name for name, waited in waits_for.items() if not waited]
        terminals: set[str] = set()
        while ready:
            name = ready.pop()
            terminals.add(name)
            for user in users[name]:
                waits_for[user].discard(name)
                if not waits_for[user]:
                    ready.append(user)
        return terminals

    def _symbol(self, name: str) -> str:
        letter = "T" if name in self._terminals else "t"
        return f"{letter}{self._numbers[name]}"

    def _classify(self, node: _Expression) -> bool:
        match node:
            case _Text():
                result = True
            case _Name(name):
                result = name in self._terminals
            case _Repeat(inner):
                result = self._classify(inner)
            case _Sequence(nodes) | _Choice(nodes):
                # A list, not a generator: `all` would stop at the first False and leave the other
                # nodes unclassified.
                classified = [self._classify(each) for each in nodes]
                result = all(classified)
        self._is_terminal[id(node)] = result
        return result

    def _terminal(self, node: _Expression) -> str:
        match node:
            case _Text(expression):
                return f"/{expression}/" if expression else '""'
            case _Name(name):
                return self._symbol(name)
            case _Repeat(inner, low, high):
                return f"({self._terminal(inner)}){_bounds(low, high)}"
            case _Sequence(nodes):
                return " ".join(map(self._terminal, nodes)) or '""'
            case _Choice(nodes):
                return "(" + " | ".join(map(self._terminal, nodes)) + ")"

    def _rule(self, node: _Expression) -> str:
        """The Lark text of an expression in a recursive rule. Parts of the expression that are not
        recursive become terminals.
        """
        if self._is_terminal[id(node)]:
            return self._part([node])
        match node:
            case _Repeat(inner, low, high):
                return f"({self._rule(inner)}){_bounds(low, high)}"
            case _Choice(nodes):
                return "(" + " | ".join(map(self._rule, nodes)) + ")"
            case _Sequence(nodes):
                return " ".join(self._stretches(nodes))
        assert isinstance(node, _Name)
        return self._symbol(node.name)

    def _stretches(self, nodes: tuple[_Expression, ...]) -> Iterator[str]:
        stretch: list[_Expression] = []
        for node in nodes:
            if self._is_terminal[id(node)]:
                stretch.append(node)
                continue
            if stretch:
                yield self._part(stretch)
                stretch = []
            yield self._rule(node)
        if stretch:
            yield self._part(stretch)

    def _part(self, nodes: list[_Expression]) -> str:
        if len(nodes) == 1 and isinstance(nodes[0], _Name):
            return self._symbol(nodes[0].name)
        self._num_parts += 1
        symbol = f"P{self._num_parts}"
        self._lines.append(f"{symbol}: {self._terminal(_Sequence(tuple(nodes)))}")
        return symbol


def _bounds(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _names(node: _Expression) -> Iterator[str]:
    match node:
        case _Name(name):
            yield name
        case _Repeat(inner):
            yield from _names(inner)
        case _Sequence(nodes) | _Choice(nodes):
            for each in nodes:
                yield from _names(each)
