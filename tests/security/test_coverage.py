"""The table of docs/security-tests.md is whole and true, and every file here says what it defends
(all of SEC and FLT; T1 to T6).
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "security-tests.md"
NUMBERS = {
    "SEC": (*range(1, 9), *range(10, 18), *range(20, 34), *range(40, 44), 60, 61),
    "FLT": tuple(range(1, 28)),
}
IDS = [f"{kind}-{number:02}" for kind, numbers in NUMBERS.items() for number in numbers]
ROW = re.compile(r"^\| ((?:SEC|FLT)-\d\d) \| [^|]+ \| (.+) \|$", re.MULTILINE)
FILES = sorted(Path(__file__).parent.rglob("test_*.py"))
# Lowest versions without a known hole, of what reads foreign data.
FLOORS = {
    "jinja2": (3, 1, 6),
    "python-multipart": (0, 0, 22),
    "torch": (2, 10),
    "transformers": (5, 3),
    "vllm": (0, 23, 1),
}


def rows() -> dict[str, list[str]]:
    """The files that each id names."""
    found = ROW.findall(TABLE.read_text(encoding="utf-8"))
    assert len({name for name, _ in found}) == len(found), "an id has two rows"
    return {name: re.findall(r"`(tests/[^`]+)`", where) for name, where in found}


def test_every_security_id_has_a_row_and_its_test_files_exist() -> None:
    assert sorted(rows()) == sorted(IDS)
    text = TABLE.read_text(encoding="utf-8")
    for name, files in rows().items():
        assert files or re.search(rf"\| {name} \|.*does not apply: ", text), name
        assert all((ROOT / file).is_file() for file in files), (name, files)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_security_test_file_names_its_threat_and_ids(path: Path) -> None:
    words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert re.search(r"\bT[1-6]\b", words), "the line of the threat model"
    ids = re.findall(r"\b(?:SEC|FLT)-\d\d\b", words)
    assert ids or path == Path(__file__), "the id"
    assert set(ids) <= set(IDS)


def test_every_security_test_file_is_in_the_table() -> None:
    named = {file for files in rows().values() for file in files}
    apart = {
        "test_coverage.py",
        "test_anthropic_errors.py",
        "test_checkpoint_validation.py",
        "test_keys.py",
    }
    missing = [path.name for path in FILES if path.relative_to(ROOT).as_posix() not in named]
    assert set(missing) <= apart


def test_dependencies_with_known_vulnerabilities_have_minimum_versions() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name, floor in FLOORS.items():
        found = re.search(rf'"{name}(?:\[\w+\])?>=([\d.]+)', text)
        assert found, name
        assert tuple(map(int, found[1].split("."))) >= floor, name
