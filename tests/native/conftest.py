"""The compiled module under test: the installed one, or one from a directory (sanitizer build)."""

import importlib.util
import os
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest


@cache
def load_native() -> ModuleType:
    directory = os.environ.get("ENGINE_NATIVE_DIR")
    if directory is None:
        from engine.native.compiled import kernels

        return kernels()
    (path,) = Path(directory).glob("_native*.so")
    spec = importlib.util.spec_from_file_location("_native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_NATIVE = load_native()


@pytest.fixture(scope="session")
def native() -> ModuleType:
    return _NATIVE


@pytest.fixture(params=_NATIVE.instruction_sets())
def isa(request: pytest.FixtureRequest) -> str:
    """Every instruction set that this machine has."""
    return request.param
