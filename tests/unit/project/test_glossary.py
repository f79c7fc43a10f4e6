"""One word, one meaning: docs/glossary.md against the names of classes, modules and variables."""

import ast
import re
from collections import defaultdict

from engine_tools.source_trees import ROOT, SourceFile, sources

GLOSSARY = ROOT / "docs" / "glossary.md"
# A class of each framework may have the name of its counterparts in the others.
FRAMEWORKS = frozenset({"native", "torch", "jax", "tinygrad", "runners"})
# Each script of a developer stands alone, as an example.
SCRIPTS = "engine_tools.dev."


def table(heading: str) -> dict[str, str]:
    """The first two columns of the table below a heading, whose words are quoted."""
    text = (
        GLOSSARY.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    )
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", text, re.M))


def room_of(module: str) -> str:
    package, name = module.split(".")[:2]
    return "frameworks" if name in FRAMEWORKS else package if package != "engine" else name


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split("[")[0].endswith("Protocol") for base in node.bases)


def classes() -> dict[str, set[str]]:
    """For each public class, the rooms that define one of that name. A protocol may have the name
    of what implements it.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for source in sources():
        for node in source.tree.body:
            if not isinstance(node, ast.ClassDef) or source.module.startswith(SCRIPTS):
                continue
            if not node.name.startswith("_") and not is_protocol(node):
                found[node.name].add(room_of(source.module))
    return found


def words(source: SourceFile) -> set[str]:
    """The words that names of a module are made of: `is_new_tenant` and `NewTenant` have new and
    tenant.
    """
    names = {source.path.stem}
    for node in source.nodes:
        for attribute in ("id", "attr", "name", "arg"):
            if isinstance(name := getattr(node, attribute, None), str):
                names.add(name)
    return {word.lower() for name in names for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def test_a_class_name_means_one_thing_in_all_rooms() -> None:
    listed = table("Names of several classes")
    shared = {name: rooms for name, rooms in classes().items() if len(rooms) > 1}
    unlisted = {name: sorted(rooms) for name, rooms in shared.items() if name not in listed}
    assert not unlisted, "rename one, or give the glossary a reason"
    assert listed.keys() <= shared.keys(), "the glossary lists a name that is shared no more"


def test_retired_words_are_not_used_in_names() -> None:
    retired = table("Retired words")
    assert len(retired) >= 10
    used = [
        f"{source.module}: {word}, say {retired[word]}"
        for source in sources()
        for word in sorted(words(source) & retired.keys())
    ]
    assert not used


def test_glossary_words_are_defined_once() -> None:
    text = GLOSSARY.read_text(encoding="utf-8").partition("## Retired words")[0]
    text = text.partition("## Letters for shapes")[0]
    defined = re.findall(r"^\| ([a-zA-Z][^|]*?) \| ", text, re.M)
    terms = [term for row in defined for term in row.split(", ") if term != "word"]
    assert len(terms) > 100
    assert sorted(terms) == sorted(set(terms)), sorted(t for t in set(terms) if terms.count(t) > 1)
