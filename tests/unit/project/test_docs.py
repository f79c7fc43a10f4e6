"""The documents: an index that has every page, links that lead somewhere, reference pages that
follow the code.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cli.commands import COMMANDS, LazyCommand
from engine.cli.help import EXAMPLES
from engine.core.config_schema import SECTIONS, setting_keys
from engine_tools.dev import module_map, reference_pages

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
SHELVES = ["Tasks", "Start", "Use", "Operate", "Change the code"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OWN_SITE = PROJECT["urls"]["Repository"]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "build" for part in path.relative_to(ROOT).parts)
)

# They look like settings, but are a value of the Helm chart and a field of an answer.
NO_SETTINGS = {"storage.existingClaim", "cache.prefill_node"}


def links(text: str) -> Iterator[str]:
    """Targets of a page's links, without those in code."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    prose = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def broken(page: Path) -> Iterator[str]:
    for link in links(page.read_text(encoding="utf-8")):
        base = page.parent
        target, _, anchor = link.partition("#")
        if target.startswith(OWN_SITE):  # a file of this folder has a relative link
            yield link
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (base / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_resolve(page: Path) -> None:
    assert not list(broken(page))


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    site = f"{OWN_SITE}/blob/main/README.md"
    page.write_text(f"# One\n[a](page.md#one) [b](gone.md) [c](#two) [d]({site}) `[e](code.md)`\n")
    assert list(broken(page)) == ["gone.md", "#two", site]


def test_every_page_is_listed_once_in_the_index() -> None:
    text = INDEX.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == SHELVES
    listed = re.findall(r"^- \[[^\]]+\]\(([^)#]+)\): \S.*\.$", text, flags=re.MULTILINE)
    inside = [(DOCS / target).resolve() for target in listed]
    pages = [path for path in DOCS.rglob("*.md") if path != INDEX]
    assert sorted(path for path in inside if path.is_relative_to(DOCS)) == sorted(pages)


def test_the_examples_of_the_readme_end() -> None:
    """A small model may answer until its context is full."""
    blocks = re.findall(r"```\w+\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    asking = [each for each in blocks if re.search(r"messages|llm\.generate", each)]
    assert len(asking) >= 3
    assert all("max_tokens" in each for each in asking)


def test_the_commands_page_lists_every_command() -> None:
    rows = re.findall(
        r"^\| (`engine .*?) \| ", (DOCS / "commands.md").read_text("utf-8"), re.MULTILINE
    )
    assert {name for row in rows for name in re.findall(r"`engine ([a-z]+)", row)} == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_scripts_and_settings_named_in_documents_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    modules = re.findall(r"\bpython3? -m ((?:engine|benchmarks|tests)\.[\w.]+)", text)
    scripts = [
        f"engine_tools.dev.{name}" for name in re.findall(r"`engine\s+dev\s+([a-z][\w-]*)", text)
    ]
    paths = [ROOT / each.rstrip(".").replace(".", "/") for each in (*modules, *scripts)]
    assert [str(each) for each in paths if not is_module(each)] == []
    if page.name == "CHANGELOG.md":  # it also tells of settings that are gone
        return
    named = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z]\w+)(?: = [^`]*)?`", text))
    assert named - {*setting_keys(), *NO_SETTINGS} == set()


def is_module(path: Path) -> bool:
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def flags(command: Any) -> set[str]:
    """Of a command and the commands below it."""
    inner = getattr(command, "commands", {}).values()
    own = [name for each in command.params for name in (*each.opts, *each.secondary_opts)]
    return {*own, *(name for each in inner for name in flags(each))}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"dev"}))
def test_flags_in_the_documents_exist(name: str) -> None:
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES]
    calls = [call for text in texts for call in re.findall(rf"\bengine {name}\b[^`|#\n]*", text)]
    given = {flag for call in calls for flag in re.findall(r"\s(--[a-z][a-z-]*)", call)}
    known = flags(LazyCommand(name, *COMMANDS[name]).resolve())
    assert given <= known


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_two_examples_of_a_commands_help_fit_it(name: str) -> None:
    command = LazyCommand(name, *COMMANDS[name]).resolve()
    inner = getattr(command, "commands", {})
    assert len(EXAMPLES[name]) == 2
    for example in EXAMPLES[name]:
        first, *words = shlex.split(example)
        assert first == name
        assert {each for each in words if re.match(r"--?[a-z]", each)} <= flags(command)
        assert not inner or not {*words}.isdisjoint(inner)


@pytest.mark.parametrize("name", reference_pages.pages())
def test_reference_pages_follow_the_code(name: str) -> None:
    page = (reference_pages.FOLDER / name).read_text(encoding="utf-8")
    assert page == reference_pages.pages()[name], "run `engine dev reference_pages`"


@pytest.mark.seconds
def test_a_stale_reference_page_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_pages, "FOLDER", tmp_path)
    (tmp_path / "reference").mkdir()
    with pytest.raises(SystemExit):
        reference_pages.main(["--check"])
    assert not list(tmp_path.rglob("*.md"))
    reference_pages.main([])
    reference_pages.main(["--check"])
    (tmp_path / "reference/metrics.md").write_text("old")
    with pytest.raises(SystemExit):
        reference_pages.main(["--check"])


def test_a_setting_without_a_docstring_is_refused() -> None:
    class Section(reference_pages.BaseModel):
        port: int = 1
        """Port to listen on."""
        host: str = ""

    with pytest.raises(ValueError, match="no sentence below host"):
        list(reference_pages._fields(Section))


def test_the_module_map_prints_first_sentences(tmp_path: Path) -> None:
    files = {
        "__init__.py": '"""A package. And more."""',
        "b.py": '"""Reads `b`\nfor 1.5 s: all of it.\n\nNot this. """',
        "a.py": "import not_installed",
        "inner/__init__.py": "",
        "inner/c.py": '"""Of c"""',
        "data/x.json": "{}",
    }
    for name, text in files.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(module_map.tree(tmp_path / "package")) == [
        "package/  A package.",
        "  a.py",
        "  b.py  Reads `b` for 1.5 s: all of it.",
        "  inner/",
        "    c.py  Of c",
    ]
