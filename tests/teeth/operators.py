"""Mistakes that people make in this code base, as operators on its syntax trees.

An operator takes a node and yields what may stand there instead, as source. `Site` has what it
knows about the place. What only logs, counts for metrics or raises an assertion is left alone.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.teeth.blocks import FUNCTIONS, block_of_nodes

ROOT = Path(__file__).parents[2]
Node = ast.AST


@dataclass(frozen=True)
class Mutant:
    """A mistake, and where it is. `start` and `end` are bytes of the module's source."""

    module: str
    line: int
    operator: str
    start: int
    end: int
    wrong: str
    diff: str  # one line
    function: str
    block: int | None  # among the module's, if it does not run at import

    @property
    def name(self) -> str:
        return f"{self.module.replace('.', '/')}.py:{self.line} {self.operator}"


@dataclass(frozen=True)
class Site:
    parents: Mapping[Node, Node]
    function: ast.FunctionDef | ast.AsyncFunctionDef | None

    def parent(self, node: Node) -> Node | None:
        return self.parents.get(node)


Operator = Callable[[Node, Site], Iterator[str]]
text = ast.unparse


def negated_condition(node: Node, site: Site) -> Iterator[str]:
    parent = site.parent(node)
    if not isinstance(parent, ast.If | ast.While | ast.IfExp) or parent.test is not node:
        return
    if isinstance(parent, ast.If) and all(_is_aside(each) for each in parent.body):
        return
    opposite = {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
    if isinstance(node, ast.Compare) and type(node.ops[0]) in opposite:
        yield f"{text(node.left)} {opposite[type(node.ops[0])]} {text(node.comparators[0])}"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield text(node.operand)
    else:
        yield f"not ({text(node)})"


TIMES = re.compile(r"monotonic|deadline|_s\b|now|elapsed|seconds|time|age\b")


def moved_boundary(node: Node, site: Site) -> Iterator[str]:
    """At an instant, both sides of the boundary are right."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or TIMES.search(text(node)):
        return
    others = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
    if (other := others.get(type(node.ops[0]))) is not None:
        yield f"{text(node.left)} {other} {text(node.comparators[0])}"


def dropped_condition(node: Node, site: Site) -> Iterator[str]:
    """A guard among several, such as the owner of a row, or the default after an `or`."""
    if not isinstance(node, ast.BoolOp):
        return
    word = " and " if isinstance(node.op, ast.And) else " or "
    for index in range(len(node.values)):
        left = [each for i, each in enumerate(node.values) if i != index]
        yield "(" + word.join(f"({text(each)})" for each in left) + ")"


def dropped_filter(node: Node, site: Site) -> Iterator[str]:
    """The condition of a comprehension holds for all."""
    parent = site.parent(node)
    if isinstance(parent, ast.comprehension) and node in parent.ifs:
        yield "True"


OWNED = re.compile(r"\b\w*(?:owner|tenant|salt)\w* = (?:\?|COALESCE\([^)]*\))|kept_until [<>]=? \?")


def dropped_owner(node: Node, site: Site) -> Iterator[str]:
    """A query that finds what belongs to others, or what has expired."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        if isinstance(site.parent(node), ast.JoinedStr):
            return
        for each in OWNED.finditer(node.value):
            wrong = f"({each[0]} OR TRUE)"
            yield repr(node.value[: each.start()] + wrong + node.value[each.end() :])
    if isinstance(node, ast.JoinedStr):
        written = text(node)
        for each in OWNED.finditer(written):
            yield f"{written[: each.start()]}({each[0]} OR TRUE){written[each.end() :]}"


def off_by_one(node: Node, site: Site) -> Iterator[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        if isinstance(node.right, ast.Constant) and node.right.value == 1:
            yield f"({text(node.left)})"
        elif isinstance(node.left, ast.Constant) and node.left.value == 1:
            yield f"({text(node.right)})"
    parent = site.parent(node)
    if isinstance(parent, ast.Slice) and not isinstance(node, ast.Constant | ast.UnaryOp):
        yield f"{text(node)} + 1"
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.BinOp)
        and isinstance(node.operand.op, ast.FloorDiv)
        and isinstance(node.operand.left, ast.UnaryOp)
    ):  # rounded up
        yield f"({text(node.operand.left.operand)} // {text(node.operand.right)})"


UNITS = {1000, 1e6, 1e9, 1e-3, 1024, 60, 8}
SIZES = re.compile(r"block_size|num_bytes|itemsize|_tokens|tokens_per|bytes_per|element_size")


def wrong_unit(node: Node, site: Site) -> Iterator[str]:
    """Blocks for tokens, milliseconds for seconds, characters for bytes."""
    if isinstance(node, ast.BinOp):
        scales = isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv | ast.LShift)
        if scales and _is_unit(node.right):
            yield f"({text(node.left)})"
        elif isinstance(node.op, ast.Mult) and _is_unit(node.left):
            yield f"({text(node.right)})"
    if isinstance(node, ast.Call) and text(node.func) == "len" and node.args:
        inner = node.args[0]
        function = inner.func if isinstance(inner, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr == "encode":
            yield f"len({text(function.value)})"


def _is_unit(node: Node) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and node.value in UNITS
    return isinstance(node, ast.Name | ast.Attribute) and SIZES.search(text(node)) is not None


def dropped_call(node: Node, site: Site) -> Iterator[str]:
    """A missing release, abort, update or notification."""
    if isinstance(node, ast.Expr) and not _is_aside(node):
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call) and text(value.func) != "super().__init__":
            yield "pass"


def kept_state(node: Node, site: Site) -> Iterator[str]:
    """State that is not updated, outside of a constructor."""
    if site.function is None or site.function.name in ("__init__", "__post_init__"):
        return
    targets: list[ast.expr] = []
    if isinstance(node, ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Assign):
        targets = node.targets
    held = ast.Attribute | ast.Subscript
    if isinstance(node, ast.Delete) or (targets and all(isinstance(t, held) for t in targets)):
        yield "pass"


def dropped_field(node: Node, site: Site) -> Iterator[str]:
    """An argument with a default is not passed on; state is not copied by `replace`."""
    if not isinstance(node, ast.Call) or _is_aside(node):
        return
    name = text(node.func).rpartition(".")[2]
    optional = optional_parameters().get(name, frozenset())
    for index, each in enumerate(node.keywords):
        if each.arg is not None and (name == "replace" or each.arg in optional):
            kept = [k for i, k in enumerate(node.keywords) if i != index]
            yield text(ast.Call(node.func, node.args, kept))


def missing_in_key(node: Node, site: Site) -> Iterator[str]:
    """A cache key or an identity without one of its parts."""
    if not isinstance(node, ast.Tuple) or len(node.elts) < 2 or not _is_key(node, site):
        return
    for index in range(len(node.elts)):
        kept = [each for i, each in enumerate(node.elts) if i != index]
        yield "(" + "".join(f"{text(each)}, " for each in kept) + ")"


KEYS = re.compile(r"key|ident|fingerprint|digest|salt|hash|namespace|seed")


def _is_key(node: Node, site: Site) -> bool:
    around = site.parent(node)
    while isinstance(around, ast.Call | ast.IfExp | ast.Starred):
        around = site.parent(around)
    if isinstance(around, ast.Assign):
        return KEYS.search(" ".join(text(each) for each in around.targets)) is not None
    function = site.function
    return isinstance(around, ast.Return) and bool(function and KEYS.search(function.name))


def swapped_arguments(node: Node, site: Site) -> Iterator[str]:
    """Two neighbours that are alike: parameters of one type, or names of one kind."""
    if not isinstance(node, ast.Call):
        return
    for index in range(len(node.args) - 1):
        if _are_alike(node.args[index], node.args[index + 1], site):
            swapped = list(node.args)
            swapped[index : index + 2] = reversed(swapped[index : index + 2])
            yield text(ast.Call(node.func, swapped, node.keywords))
    if isinstance(node.func, ast.Name) and node.func.id in ("min", "max") and len(node.args) > 1:
        other = "max" if node.func.id == "min" else "min"
        yield text(ast.Call(ast.Name(other), node.args, node.keywords))


def _are_alike(one: ast.expr, other: ast.expr, site: Site) -> bool:
    if not all(isinstance(each, ast.Name | ast.Attribute) for each in (one, other)):
        return False
    first, second = (text(each).rpartition(".")[2] for each in (one, other))
    types = _annotations(site.function)
    if first in types and second in types:
        return types[first] == types[second]
    return bool(set(first.split("_")) & set(second.split("_")) & ALIKE)


ALIKE = frozenset(["id", "ids", "tokens", "num", "max", "bytes", "blocks", "name", "s", "key"])


def _annotations(function: ast.FunctionDef | ast.AsyncFunctionDef | None) -> dict[str, str]:
    if function is None:
        return {}
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return {each.arg: text(each.annotation) for each in arguments if each.annotation is not None}


INDEXES = ("row", "slot", "index", "position", "choice", "rank", "number", "start", "end", "block")


def wrong_index(node: Node, site: Site) -> Iterator[str]:
    """By row instead of by slot."""
    parent = site.parent(node)
    if not isinstance(parent, ast.Subscript) or parent.slice is not node or site.function is None:
        return
    if isinstance(node, ast.Attribute) and node.attr in ("slot", "choice", "index"):
        yield "0"
    if not isinstance(node, ast.Name) or node.id not in INDEXES:
        return
    known = {each.id for each in ast.walk(site.function) if isinstance(each, ast.Name)}
    yield from (other for other in INDEXES if other in known and other != node.id)


def swallowed_error(node: Node, site: Site) -> Iterator[str]:
    if isinstance(node, ast.Raise):
        yield "pass"


def wrong_default(node: Node, site: Site) -> Iterator[str]:
    """What is missing is an error, or something else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    if node.func.attr not in ("get", "pop") or len(node.args) != 2 or node.keywords:
        return
    key, default = (text(each) for each in node.args)
    if node.func.attr == "pop":
        yield f"{text(node.func)}({key})"
        return
    known = {"True": "False", "False": "True", "None": "0", "0": "1", "1": "0"}
    yield f"{text(node.func)}({key}, {known.get(default, 'None')})"


def wrong_answer(node: Node, site: Site) -> Iterator[str]:
    """`True` for `False`; the loop ends or goes on."""
    if isinstance(node, ast.Return) and text(node) in ("return True", "return False"):
        yield "return False" if text(node) == "return True" else "return True"
    if isinstance(node, ast.Continue):
        yield "break"
    if isinstance(node, ast.Break):
        yield "pass"


OPERATORS: tuple[Operator, ...] = (
    dropped_owner,
    wrong_index,
    dropped_field,
    missing_in_key,
    off_by_one,
    wrong_unit,
    dropped_call,
    kept_state,
    swapped_arguments,
    moved_boundary,
    negated_condition,
    dropped_condition,
    dropped_filter,
    swallowed_error,
    wrong_default,
    wrong_answer,
)

ASIDE = re.compile(r"^(self\.)?_?(log|logger|logging|metrics|warnings)\b|\.(observe|inc|labels)\(")


def _is_aside(node: Node) -> bool:
    """What only logs or counts."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _is_aside(node.value)
    return isinstance(node, ast.Call) and ASIDE.search(text(node)) is not None


@cache
def optional_parameters() -> dict[str, frozenset[str]]:
    """The parameters and fields with defaults, by the name of a function or class of the engine
    that all functions of this name share.
    """
    found: dict[str, list[frozenset[str]]] = {}
    for path in (ROOT / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, FUNCTIONS):
                found.setdefault(node.name, []).append(_defaults(node.args))
            elif isinstance(node, ast.ClassDef):
                fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
                names = frozenset(text(each.target) for each in fields if each.value is not None)
                starts = [each for each in node.body if getattr(each, "name", "") == "__init__"]
                for each in starts:
                    if isinstance(each, FUNCTIONS):
                        names = _defaults(each.args)
                found.setdefault(node.name, []).append(names)
    return {name: frozenset.intersection(*each) for name, each in found.items()}


def _defaults(arguments: ast.arguments) -> frozenset[str]:
    named = [*arguments.posonlyargs, *arguments.args]
    with_default = named[len(named) - len(arguments.defaults) :]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    with_default += [each for each, default in pairs if default is not None]
    return frozenset(each.arg for each in with_default)


SKIPPED = (ast.Assert, ast.Raise, ast.JoinedStr, ast.FormattedValue)


def mutants_of(module: str, path: Path) -> Iterator[Mutant]:
    source = path.read_bytes()
    tree = ast.parse(source)
    offsets = [0]
    for line in source.splitlines(True):
        offsets.append(offsets[-1] + len(line))
    numbers = block_of_nodes(tree)
    for node, function, site in _places(tree):
        start = offsets[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = offsets[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        right = source[start:end].decode()
        for operator in OPERATORS:
            for wrong in operator(node, site):
                if wrong == right:
                    continue
                number = node.lineno  # type: ignore[attr-defined]
                diff = f"-{' '.join(right.split())}  +{wrong}"
                kept = wrong + "\n" * right.count("\n") if isinstance(node, ast.stmt) else wrong
                yield Mutant(
                    module, number, operator.__name__, start, end, kept, diff, function,
                    numbers.get(node),
                )  # fmt: skip


def _places(tree: ast.Module) -> Iterator[tuple[Node, str, Site]]:
    """Each node of a function where a mistake can be, with the function's name."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def visit(
        node: Node, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef | None
    ) -> Iterator[tuple[Node, str, Site]]:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            name = f"{name}.{node.name}".lstrip(".")
        if function is not None and hasattr(node, "lineno"):
            yield node, name, Site(parents, function)
        if isinstance(node, FUNCTIONS):
            if node.name == "__repr__":
                return
            for statement in node.body:
                yield from visit(statement, name, node)
            return
        if isinstance(node, SKIPPED) or _is_aside(node):
            return
        inside = ast.iter_child_nodes(node)
        if isinstance(node, ast.AnnAssign):
            inside = iter([node.value] if node.value is not None else [])
        for child in inside:
            yield from visit(child, name, function)

    yield from visit(tree, "", None)
