"""A mistake planted in one module: what an import finds instead of the file, in every process."""

import ast
import importlib.abc
import importlib.machinery
import linecache
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Planted:
    module: str
    source: str  # of the whole module, with the mistake
    function: str | None  # the outermost function that has changed, if nothing around it has
    line: int  # of the function


def path_of(module: str) -> Path:
    path = ROOT / (module.replace(".", "/") + ".py")
    return path if path.exists() else path.with_suffix("") / "__init__.py"


def plant(module: str, start: int, end: int, wrong: bytes) -> Planted:
    """Replace the bytes from `start` to `end` of the module's source."""
    source = path_of(module).read_bytes()
    changed = (source[:start] + wrong + source[end:]).decode()
    line = source.count(b"\n", 0, start) + 1
    last = source.count(b"\n", 0, end) + 1
    for function, node in _outermost(ast.parse(source).body, ""):
        if node.body[0].lineno <= line and last <= (node.end_lineno or 0):
            if any("jit" in ast.unparse(each) for each in node.decorator_list):
                break  # a compiler has read its source by then
            decorators = [each.lineno for each in node.decorator_list]
            return Planted(module, changed, function, min(decorators, default=node.lineno))
    return Planted(module, changed, None, line)


def _outermost(
    body: Sequence[ast.stmt], around: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield around + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _outermost(node.body, f"{around}{node.name}.")


class _Loader(importlib.machinery.SourceFileLoader):
    source: str

    def get_code(self, fullname: str) -> CodeType:
        # For tests that read the source; with no mtime, linecache does not compare it with the
        # file.
        lines = self.source.splitlines(True)
        linecache.cache[self.path] = (len(self.source), None, lines, self.path)
        return compile(self.source, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, source: str) -> None:
        self._module = module
        self._source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin)
        spec.loader.source = self._source
        return spec


def install(module: str, source: str) -> None:
    """Imports of the module find this source from now on."""
    sys.meta_path.insert(0, _Finder(module, source))


def hand_on(planted: Planted, folder: Path) -> None:
    """Plant the mistake in every child interpreter too: each runs this file first."""
    source = folder / "planted.txt"
    source.write_text(planted.source)
    lines = (
        "from pathlib import Path",
        "from tests.teeth.planted import install",
        f"install({planted.module!r}, Path({str(source)!r}).read_text())",
    )
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(folder), str(ROOT)))
