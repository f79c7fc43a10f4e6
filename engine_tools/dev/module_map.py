"""Prints the package as a tree, with the first sentence of each folder's and module's docstring.

    engine dev module_map                     # the whole package
    engine dev module_map engine/servers      # one folder

Sources are parsed and never imported, so a framework need not be installed.
"""

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import engine

PACKAGE = Path(engine.__file__).parent
_INIT = "__init__.py"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGE, metavar="FOLDER")
    folder = parser.parse_args(arguments).folder
    if not folder.is_dir():
        parser.error(f"there is no folder {folder}")
    print("\n".join(tree(folder.resolve())))


def tree(folder: Path, indent: str = "") -> Iterator[str]:
    """A line for the folder, then its modules, then its subfolders."""
    yield _line(f"{indent}{folder.name}/", folder / _INIT)
    inner = indent + "  "
    for module in sorted(folder.glob("*.py")):
        if module.name != _INIT:
            yield _line(f"{inner}{module.name}", module)
    for each in sorted(folder.iterdir()):
        if each.is_dir() and any(each.glob("*.py")):
            yield from tree(each, inner)


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring; empty if it has none."""
    if not path.is_file():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]


def _line(name: str, path: Path) -> str:
    sentence = first_sentence(path)
    return f"{name}  {sentence}" if sentence else name


if __name__ == "__main__":
    main()
