"""The list of deliberate mistakes keeps up with the code; `make test-slow` makes them."""

import re
from pathlib import Path

import pytest

from tests.teeth.mutation import MACHINE, SCHEDULES
from tests.teeth.mutations import MUTATIONS
from tests.teeth.run import applies

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_can_still_be_made_and_has_its_test(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    mutation = MUTATIONS[name]
    assert applies(mutation), f"{mutation.module} no longer has what it replaces"
    if mutation.caught_by in (MACHINE, SCHEDULES):
        return
    path, _, test = mutation.caught_by.partition("::")
    assert Path(path).is_file()
    function = test.partition("[")[0]
    assert re.search(rf"def {function}\(", Path(path).read_text()) or not test
