"""Skips tinygrad tests without clang, which `make test` installs where it can."""

import pytest

from engine.backends.custom.frameworks.tinygrad.clang import missing_clang


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = missing_clang()
    if problem is None:
        return
    for item in items:
        if "tinygrad" in item.nodeid.lower():
            item.add_marker(pytest.mark.skip(reason=problem))
