"""Skips tinygrad tests without clang, which `make test` installs where it can. Of the models, `make
test-quick` takes a few.
"""

from pathlib import Path

import pytest

from engine.tinygrad.clang import missing_clang

QUICK_MODELS = ("gpt2", "llama", "qwen3")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = missing_clang()
    for item in items:  # of all folders
        if Path(__file__).parent not in item.path.parents:
            continue
        if problem is not None and "tinygrad" in item.nodeid.lower():
            item.add_marker(pytest.mark.skip(reason=problem))
        if model_of(item) not in (None, *QUICK_MODELS):
            item.add_marker(pytest.mark.seconds)


def model_of(item: pytest.Item) -> str | None:
    """The model of `tiny_models` that a test is about."""
    if not item.path.name.endswith("_models.py") or not hasattr(item, "callspec"):
        return None
    params = item.callspec.params
    return params.get("source", params.get("name"))
