"""For tests that read our own code."""

import gc
from collections.abc import Iterator

import pytest

from engine_tools.source_trees import imports, sources


@pytest.fixture(scope="module", autouse=True)
def trees_are_no_garbage() -> Iterator[None]:
    """Looking for it among a million nodes takes longer than reading them."""
    gc.disable()
    yield
    for each in (sources, imports):
        each.cache_clear()
    gc.enable()
