"""The list of deliberate mistakes keeps up with the code; `make test-slow` makes them."""

import re
from pathlib import Path

import pytest

from tests.teeth.mutation import MACHINE
from tests.teeth.mutations import MUTATIONS
from tests.teeth.run import applies

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutant_still_applies_and_names_an_existing_test(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    mutation = MUTATIONS[name]
    assert applies(mutation), f"{mutation.module} no longer has what it replaces"
    if mutation.caught_by == MACHINE:
        return
    path, *names = mutation.caught_by.split("::")
    assert Path(path).is_file()
    assert all(is_defined(name.partition("[")[0], Path(path)) for name in names)


def is_defined(name: str, path: Path) -> bool:
    """In the file, or in what it imports of ours: a class there may bring its tests."""
    source = path.read_text()
    imported = re.findall(r"^from ((?:engine|tests)[\w.]*) import", source, re.MULTILINE)
    files = [Path(module.replace(".", "/") + ".py") for module in imported]
    sources = [source, *(each.read_text() for each in files if each.is_file())]
    return any(re.search(rf"(def|class) {name}[(:]", each) for each in sources)
