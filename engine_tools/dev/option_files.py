"""Counts the files that someone edits who adds an option of the engine or a request parameter.

    engine dev option_files kv_dtype min_p

A file of the package counts if its code has the name: as an identifier, or as a string that is
this name alone, with or without its section. Comments and texts do not count. Files that compute
with the value are listed apart: they are the effect of the option, and each option has its own.
"""

import argparse
import ast
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import engine
from engine.runtime.model_runner import RunnerConfig

PACKAGE = Path(engine.__file__).parent
# Where values take effect: the engine process, and tools that run a model by themselves.
COMPUTING = (
    *("runtime", "worker", "runners", "native", "torch", "jax", "tinygrad", "tools"),
    "backends/transformers",
)
# Among these files, the one that lists the options of frameworks.
RUNNER_OPTIONS = "runtime/model_runner.py"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="such as kv_dtype")
    for name in parser.parse_args(arguments).names:
        declaring, computing = files_naming(name)
        print(f"{name}: {len(declaring)} files to edit, {len(computing)} that compute with it")
        for path in declaring:
            print(f"  {path}")
        for path in computing:
            print(f"    computes: {path}")


def files_naming(name: str, package: Path = PACKAGE) -> tuple[list[str], list[str]]:
    """The files that declare or pass on an option of this name, and those that compute with it."""
    declaring: list[str] = []
    computing: list[str] = []
    for path in sorted(package.rglob("*.py")) + sorted(package.rglob("*.js")):
        text = path.read_text(encoding="utf-8")
        if name not in text or not _has_name(path, text, name):
            continue
        short = path.relative_to(package).as_posix()
        computes = short.startswith(tuple(f"{folder}/" for folder in COMPUTING))
        if short == RUNNER_OPTIONS:
            computes = name not in {field.name for field in fields(RunnerConfig)}
        (computing if computes else declaring).append(short)
    return declaring, computing


def _has_name(path: Path, text: str, name: str) -> bool:
    if path.suffix == ".js":
        return re.search(rf"\b{re.escape(name)}\b", text) is not None
    return any(_names(node, name) for node in ast.walk(ast.parse(text)))


def _names(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(id=found) | ast.Attribute(attr=found):
            return found == name
        case ast.arg(arg=found) | ast.keyword(arg=found):
            return found == name
        case ast.Constant(value=str() as found):
            # Several names may be in one string: `*_rows("top_k min_p", ...)`.
            words = found.split() if re.fullmatch(r"[\w. ]+", found) else []
            return any(each.rpartition(".")[2] == name for each in words)
    return False
