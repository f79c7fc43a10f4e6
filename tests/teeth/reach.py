"""Measures which blocks of the engine each test reaches, in its own process and in those it starts.

    python -m tests.teeth.reach tests/unit/runtime tests/unit/frontend

Every module is compiled with marks (`blocks.py`). The marks are a file in shared memory, so child
processes set them too. What a test file's tests reach is a file in `build/mutants/reach`.
"""

import ast
import builtins
import hashlib
import importlib.abc
import importlib.machinery
import json
import marshal
import mmap
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType

import msgspec
import numpy as np
import pytest

from tests.teeth.blocks import MARKS_OF, blocks, with_marks

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "mutants"
FOLDER = "ENGINE_TESTS_MARKS"  # the variable by which child processes find the marks
# Frameworks compile functions of these packages from their bytecode.
UNMARKED = ("engine.torch", "engine.jax", "engine.tinygrad")
AT_IMPORT = "import"
TIMEOUT_S = 1800  # of a test; marks make it slower, and the machine may be busy


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "engine").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(UNMARKED):
            found[name] = path
    return found


@cache
def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Marks:
    """The compiled modules of a folder, and their marks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        table = json.loads((folder / "table.json").read_text())
        self.spans: dict[str, tuple[int, int]] = {k: (a, b) for k, (a, b) in table.items()}
        with open(folder / "marks", "r+b") as file:
            self.marks = memoryview(mmap.mmap(file.fileno(), 0))

    def of(self, module: str) -> memoryview:
        first, last = self.spans[module]
        return self.marks[first:last]

    def install(self) -> None:
        setattr(builtins, MARKS_OF, self.of)
        sys.meta_path.insert(0, _Finder(self))

    def clear(self) -> None:
        self.marks[:] = bytes(len(self.marks))

    def reached(self) -> np.ndarray:  # (blocks of all modules,) uint8
        return np.frombuffer(self.marks, np.uint8).copy()


def prepare(folder: Path) -> Marks:
    """Compile all modules with marks."""
    folder.mkdir(parents=True, exist_ok=True)
    table, first = {}, 0
    for name, path in modules().items():
        tree = ast.parse(path.read_bytes())
        count = with_marks(tree, name)
        (folder / name).write_bytes(marshal.dumps(compile(tree, str(path), "exec")))
        table[name] = (first, first + count)
        first += count
    (folder / "marks").write_bytes(bytes(first))
    (folder / "table.json").write_text(json.dumps(table))
    (folder / "sitecustomize.py").write_text(
        "from tests.teeth.reach import install_in_child\ninstall_in_child()\n"
    )
    return Marks(folder)


def install_in_child() -> None:
    Marks(Path(os.environ[FOLDER])).install()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._marks.spans:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin)
        spec.loader.marks = self._marks
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    marks: Marks

    def get_code(self, fullname: str) -> CodeType:
        code = marshal.loads((self.marks.folder / fullname).read_bytes())
        assert isinstance(code, CodeType)
        return code


class Recorder:
    """A pytest plugin that writes what the tests of each file reach."""

    def __init__(self, marks: Marks, home: Path, table: str) -> None:
        self._marks = marks
        self._home = home
        self._table = table
        self._at_import = marks.reached()
        self._file: Path | None = None
        self._tests: dict[str, tuple[float, np.ndarray]] = {}
        self._failed: set[str] = set()
        self._began = 0.0

    def pytest_collection_finish(self) -> None:
        self._at_import = self._marks.reached()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._marks.clear()
        self._began = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        file = Path(nodeid.partition("::")[0])
        if file != self._file:
            self.write()
            self._file = file
        if nodeid not in self._failed:
            self._tests[nodeid] = (time.monotonic() - self._began, self._marks.reached())

    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        if self._file is None or not self._tests:
            return
        tests, self._tests = self._tests, {}
        rows = [self._at_import, *(each for _, each in tests.values())]
        np.savez_compressed(
            record_of(self._home, self._file),
            table=np.array(self._table),
            names=np.array([AT_IMPORT, *tests]),
            seconds=np.array([0.0, *(seconds for seconds, _ in tests.values())]),
            reached=np.packbits(np.array(rows, bool), axis=1),
        )


def record_of(home: Path, file: Path) -> Path:
    return home / (".".join(file.with_suffix("").parts) + ".npz")


@dataclass(frozen=True)
class Test:
    name: str  # node id
    seconds: float
    breadth: int  # blocks that it reaches

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


class Reach:
    """Which tests reach a block, by all records of a folder."""

    def __init__(self, home: Path) -> None:
        self._tables: dict[str, dict[str, Module]] = {}
        self._tests: dict[str, list[Test]] = {}  # by table, as below
        self._reached: dict[str, np.ndarray] = {}  # (tests, blocks / 8), packed
        reached: dict[str, list[np.ndarray]] = {}
        for record in sorted(home.glob("*.npz")):
            with np.load(record) as stored:
                table = str(stored["table"])
                breadths = np.unpackbits(stored["reached"], axis=1).sum(axis=1)
                rows = zip(stored["names"], stored["seconds"], breadths, strict=True)
                tests = self._tests.setdefault(table, [])
                tests += [Test(str(name), float(s), int(breadth)) for name, s, breadth in rows]
                reached.setdefault(table, []).append(stored["reached"])
        for table, parts in reached.items():
            self._tables[table] = msgspec.json.decode(
                (home / f"{table}.json").read_bytes(), type=dict[str, Module]
            )
            self._reached[table] = np.concatenate(parts)

    def tests_of(self, module: str, number: int | None, function: str) -> list[Test]:
        """Tests that reach the block. If a module has changed since the measurement, those that
        reach its function. Without a number, those that reach anything of the module.
        """
        found: dict[str, Test] = {}
        for table, modules_ in self._tables.items():
            if (known := modules_.get(module)) is None:
                continue
            blocks_ = self._blocks(known, module, number, function)
            packed = self._reached[table]
            for block in blocks_:
                at = known.first + block
                for row in np.flatnonzero(packed[:, at // 8] & (128 >> at % 8)):
                    test = self._tests[table][row]
                    found[test.name] = test
        return list(found.values())

    def _blocks(
        self, known: "Module", module: str, number: int | None, function: str
    ) -> Iterable[int]:
        if number is None:
            return range(len(known.functions))
        if known.digest == digest(modules()[module]):
            return [number]
        return [known.functions.index(function)] if function in known.functions else []


class Module(msgspec.Struct):
    """A module's blocks when its tests were measured."""

    digest: str
    first: int  # number of its first block among those of all modules
    functions: list[str]  # of each block


def write_table(marks: Marks, home: Path) -> str:
    """Returns the name of the table of what is measured now."""
    table = {}
    for name, path in modules().items():
        functions = [each.function for each in blocks(ast.parse(path.read_bytes()))]
        table[name] = Module(digest(path), marks.spans[name][0], functions)
    text = msgspec.json.encode(table)
    name = hashlib.sha256(text).hexdigest()[:12]
    (home / f"{name}.json").write_bytes(text)
    return name


def measure(paths: Sequence[str], home: Path) -> int:
    """Run the tests and record what they reach, beside what was recorded before."""
    marks = prepare(home / "code")
    table = write_table(marks, home)
    marks.install()
    os.environ[FOLDER] = str(marks.folder)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(marks.folder), str(ROOT)))
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--integration", "without"]
    options += ["--timeout", str(TIMEOUT_S)]
    return pytest.main([*options, *paths], plugins=[Recorder(marks, home, table)])


if __name__ == "__main__":
    sys.exit(measure(sys.argv[1:], HOME / "reach"))
