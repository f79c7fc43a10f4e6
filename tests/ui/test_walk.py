"""A random walk of a user shows only what it must: new walks, and all that ever failed."""

from collections.abc import Iterator

import pytest

from tests.ui.walk.walker import CHROMIUM, MODULES, Walker, kept_plans

NUM_STEPS = 50

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.skipif(
        CHROMIUM is None or not (MODULES / "node_modules" / ".package-lock.json").exists(),
        reason="needs Chromium and two packages of npm: make browser",
    ),
]


@pytest.fixture(scope="module")
def walker() -> Iterator[Walker]:
    walker = Walker()
    yield walker
    walker.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_walk_shows_what_the_model_says(walker: Walker, seed: int) -> None:
    failure = walker.walk({"seed": seed, "steps": NUM_STEPS})
    assert failure is None, failure["told"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kept", kept_plans(), ids=lambda kept: str(kept["seed"]))
def test_walk_that_failed_once_passes(walker: Walker, kept: dict[str, object]) -> None:
    failure = walker.walk(kept)
    assert failure is None, failure["told"]
