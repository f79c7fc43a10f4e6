"""Syntax trees of our own code, for tests and tools that read it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "engine_tools")


@dataclass(frozen=True, eq=False)
class SourceFile:
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@cache
def sources(*folders: str) -> tuple[SourceFile, ...]:
    """The sources below these folders; of both packages if none is named."""
    roots = [ROOT / each for each in folders or PACKAGES]
    paths = sorted(path for root in roots for path in root.rglob("*.py"))
    return tuple(SourceFile(path, path.read_text(encoding="utf-8")) for path in paths)


@cache
def module_names() -> frozenset[str]:
    return frozenset(each.module for each in sources())


def is_within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


@cache
def imports(source: SourceFile) -> tuple[tuple[ast.AST, str], ...]:
    return tuple(find_imports(source))


def find_imports(source: SourceFile) -> Iterator[tuple[ast.AST, str]]:
    """Every imported module, also inside functions; `from a import b` gives a.b if that is one."""
    known = module_names()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = source.module.split(".")
                if source.path.name != "__init__.py":
                    package = package[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield node, name if name in known else base


def dotted(node: ast.Attribute) -> str | None:
    """`a.b` of an attribute of a plain name."""
    return f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else None
