"""Skips tinygrad tests without clang, which `make test` installs where it can."""

from pathlib import Path

import pytest

from engine.backends.custom.frameworks.tinygrad.clang import missing_clang


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = missing_clang()
    if problem is None:
        return
    for item in items:  # of all folders
        if Path(__file__).parent in item.path.parents and "tinygrad" in item.nodeid.lower():
            item.add_marker(pytest.mark.skip(reason=problem))
