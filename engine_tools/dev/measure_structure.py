"""Measures the structure of the code: how far its parts are apart, and how large they are.

    engine dev measure_structure             # a table of counts
    engine dev measure_structure --list      # with the places that were counted

Sources are parsed and never imported. The rows of the table:

- long imports: imports of one of our modules whose name has six or more dotted parts, in any
  folder of the repository.
- package cycles: packages that import each other, also by way of others. A package and those
  inside of it count as one, and composition roots are left out.
- one importer next door: modules of `engine` that exactly one module imports, tests aside, if that
  module is in the same folder. Such a module might be a paragraph of its importer.
- fields of Sequence: the attributes of each sequence of the scheduler.
- large folders: folders with more than 20 files of code or text, tests included.
- duplicated runs: pairs of places with the same four lines of code or more. Comments, docstrings,
  imports and lines without a word do not count.
"""

import argparse
import ast
import gc
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations

from engine_tools.source_trees import PACKAGES, ROOT, SourceFile, imports, is_within, sources

LONG_IMPORT_PARTS = 6
LARGE_FOLDER_FILES = 20
SAME_LINES = 4
# What builds the whole from its parts. It is no part of a cycle, because only ranks bind it.
COMPOSITION_ROOTS = (
    "engine.backends.custom.app",
    "engine.cli",
    "engine.library",
    "engine.llm",
    "engine_tools",
    "engine.servers.app",
    "engine.servers.run",
)
_FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples", "docs", "csrc")
_TEXT_FILES = frozenset({".py", ".md", ".cpp", ".h", ".cu", ".cuh"})


@dataclass(frozen=True)
class Measure:
    name: str
    places: Sequence[str]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="Print the places too.")
    show_places = parser.parse_args(arguments).list
    gc.disable()  # looking for garbage among a million nodes takes longer than reading them
    for measure in measures():
        print(f"{len(measure.places):6}  {measure.name}")
        if show_places:
            print("".join(f"        {place}\n" for place in measure.places), end="")


def measures() -> Iterator[Measure]:
    yield Measure(f"imports with {LONG_IMPORT_PARTS} or more dotted parts", long_imports())
    yield Measure("package cycles", [" -> ".join(cycle) for cycle in package_cycles()])
    yield Measure("modules with one importer next door", one_importer_next_door())
    yield Measure("fields of Sequence", sequence_fields())
    yield Measure(f"folders with more than {LARGE_FOLDER_FILES} files", large_folders())
    yield Measure(f"pairs of places with the same {SAME_LINES} lines or more", duplicated_runs())


def long_imports() -> list[str]:
    return [
        f"{source.at(node)} imports {target}"
        for folder in (*PACKAGES, "tests", "benchmarks", "examples")
        for source in sources(folder)
        for node, target in imports(source)
        if is_within(target, "engine") and target.count(".") + 1 >= LONG_IMPORT_PARTS
    ]


def package_imports() -> dict[str, dict[str, str]]:
    """For each package, the packages that it imports, each with a place where it does. A package
    and those inside of it count as one, so imports between them are left out.
    """
    packages = {each.module for each in sources() if each.path.name == "__init__.py"}
    found: dict[str, dict[str, str]] = {each: {} for each in packages}
    for source in sources():
        if any(is_within(source.module, root) for root in COMPOSITION_ROOTS):
            continue
        own = _package_of(source.module, packages)
        for node, target in imports(source):
            if not is_within(target, "engine") or target in COMPOSITION_ROOTS:
                continue
            theirs = _package_of(target, packages)
            if not is_within(own, theirs) and not is_within(theirs, own):
                found[own].setdefault(theirs, f"{source.at(node)} imports {target}")
    return found


def _package_of(module: str, packages: Set[str]) -> str:
    return module if module in packages else module.rpartition(".")[0]


def package_cycles() -> list[list[str]]:
    """The shortest cycle through each package that is in one."""
    graph = package_imports()
    return [way for package in sorted(graph) if (way := _shortest_way(graph, package, package))]


def _shortest_way(graph: Mapping[str, Iterable[str]], start: str, end: str) -> list[str] | None:
    ways = deque([[start]])
    seen = {start}
    while ways:
        way = ways.popleft()
        for each in graph[way[-1]]:
            if each == end:
                return [*way, each]
            if each not in seen:
                seen.add(each)
                ways.append([*way, each])
    return None


def one_importer_next_door() -> list[str]:
    importers: dict[str, set[str]] = defaultdict(set)
    for source in (*sources(), *sources("benchmarks"), *sources("examples")):
        for _, target in imports(source):
            importers[target].add(source.module)
    packages = {each.module for each in sources() if each.path.name == "__init__.py"}
    found = []
    for source in sources("engine"):
        users = importers[source.module] - {source.module}
        if source.module in packages or len(users) != 1:
            continue
        (user,) = users
        folder = user if user in packages else user.rpartition(".")[0]
        if folder == source.module.rpartition(".")[0]:
            found.append(f"{source.module}, for {user.rpartition('.')[2]}")
    return found


def sequence_fields() -> list[str]:
    """The declared fields of the scheduler's `Sequence`, and the attributes that it begins with."""
    (source,) = (each for each in sources() if each.module == "engine.runtime.sequence")
    (body,) = (
        node
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) and node.name == "Sequence"
    )
    declared = [
        node.target.id
        for node in body.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assigned = [
        node.attr
        for method in body.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]
    return list(dict.fromkeys([*declared, *assigned]))


def large_folders() -> list[str]:
    files = [path for room in _FOLDERS for path in (ROOT / room).rglob("*")]
    sizes = Counter(path.parent for path in files if path.suffix in _TEXT_FILES)
    return [
        f"{folder.relative_to(ROOT)}: {size}"
        for folder, size in sorted(sizes.items())
        if size > LARGE_FOLDER_FILES
    ]


def code_lines(source: SourceFile) -> list[tuple[int, str]]:
    """Without blank lines, comments and docstrings: a clear text costs nothing."""
    texts = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = [line.strip() for line in source.text.splitlines()]
    return [
        (number, line)
        for number, line in enumerate(lines, 1)
        if line and not line.startswith("#") and number not in texts
    ]


def duplicated_runs() -> list[str]:
    """Each run of equal lines counts once, however long it is."""
    places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    files = [(each, _compared_lines(each)) for each in sources("engine")]
    for index, (_, lines) in enumerate(files):
        for first in range(len(lines) - SAME_LINES + 1):
            window = tuple(text for _, text in lines[first : first + SAME_LINES])
            places[window].append((index, first))
    pairs = {pair for found in places.values() for pair in combinations(found, 2)}
    starts = [
        (one, other)
        for one, other in sorted(pairs)
        if ((one[0], one[1] - 1), (other[0], other[1] - 1)) not in pairs
    ]

    def at(place: tuple[int, int]) -> str:
        source, lines = files[place[0]]
        return f"{source.path.relative_to(ROOT)}:{lines[place[1]][0]}"

    return [f"{at(one)} and {at(other)}" for one, other in starts]


def _compared_lines(source: SourceFile) -> list[tuple[int, str]]:
    imported = {
        number
        for node in source.nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return [
        (number, line)
        for number, line in code_lines(source)
        if number not in imported and re.search(r"\w", line)
    ]


if __name__ == "__main__":
    main()
