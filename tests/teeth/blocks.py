"""The blocks of a module: statements of a function that run together, or not at all.

A block begins with the body of a function, of a branch or of a loop, and after a statement that may
leave the function. Numbers follow the order of the source.
"""

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

MARKS = "__reached__"  # a module's array with a byte for each block
MARKS_OF = "__reached_of__"  # the builtin that returns it, by the module's name
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)


@dataclass(frozen=True)
class Block:
    function: str  # qualified name
    statements: list[ast.stmt]  # of which those from `first` to `last` are the block's
    first: int
    last: int


def blocks(tree: ast.Module) -> list[Block]:
    return [block for node in tree.body for block in _within(node, "")]


def _within(node: ast.AST, function: str) -> Iterator[Block]:
    """Blocks that begin inside of the node."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        function = f"{function}.{node.name}".lstrip(".")
    for name, value in ast.iter_fields(node):
        if not isinstance(value, list) or not value or not isinstance(value[0], STATEMENTS):
            continue
        inside = function and not isinstance(node, ast.ClassDef)
        if inside and isinstance(value[0], ast.stmt) and not _runs_anyway(node, name):
            yield from _segments(value, function)
        else:
            for each in value:
                yield from _within(each, function)


def _runs_anyway(node: ast.AST, field: str) -> bool:
    return isinstance(node, ast.With | ast.AsyncWith) or field == "finalbody"


def _segments(statements: list[ast.stmt], function: str) -> Iterator[Block]:
    first = 0
    for index, each in enumerate(statements):
        if index + 1 == len(statements) or _may_leave(each):
            yield Block(function, statements, first, index + 1)
            for inner in statements[first : index + 1]:
                yield from _within(inner, function)
            first = index + 1


def _may_leave(node: ast.stmt) -> bool:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return False
    return any(isinstance(each, LEAVING) for each in ast.walk(node))


def block_of_nodes(tree: ast.Module) -> dict[ast.AST, int]:
    """The innermost block of each node; what runs at import has none."""
    found: dict[ast.AST, int] = {}
    for number, block in enumerate(blocks(tree)):
        for statement in block.statements[block.first : block.last]:
            found.update(dict.fromkeys(ast.walk(statement), number))
    return found


def with_marks(tree: ast.Module, module: str) -> int:
    """Make each block mark that it was reached; returns the number of blocks."""
    start = sum(1 for _ in itertools.takewhile(_comes_first, tree.body))
    numbered = list(enumerate(blocks(tree)))
    for number, block in reversed(numbered):
        at = block.first
        where = block.statements[at]
        is_docstring = isinstance(where, ast.Expr) and isinstance(where.value, ast.Constant)
        if is_docstring and isinstance(where.value.value, str):  # type: ignore[attr-defined]
            at += 1
        mark = ast.parse(f"{MARKS}[{number}] = 1").body[0]
        for each in ast.walk(mark):
            ast.copy_location(each, where)
        block.statements.insert(at, mark)
    if numbered:  # also a module that is run as a program, which no loader prepares
        marks = ast.parse(f"{MARKS} = {MARKS_OF}({module!r})").body[0]
        for each in ast.walk(marks):
            ast.copy_location(each, tree.body[0])
        tree.body.insert(start, marks)
    return len(numbered)


def _comes_first(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
