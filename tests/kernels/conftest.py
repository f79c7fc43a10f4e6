"""Makes Triton interpret kernels. It decides when a kernel is defined, so this must run first.

On a machine with a CUDA device, the same tests run the compiled kernels.
"""

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

KERNELS = "engine.torch.kernels.base"
HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Other tests must not meet interpreted kernels: they are slow. Hence only when run alone."""
    alone = all(
        HERE in (Path(arg.split("::")[0]).resolve(), *Path(arg).resolve().parents)
        for arg in config.args
    )
    if alone and KERNELS not in sys.modules and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    runnable = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    if collection_path.suffix == ".py" and "import gguf" in collection_path.read_text():
        runnable = runnable and find_spec("gguf") is not None  # a GPU machine may lack it
    return None if runnable else True


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def language_is_patched_once() -> Iterator[None]:
    """For each launch, and for each call of a jitted function by another, the interpreter searches
    `triton.language` for what it must replace. Here what it replaced stays so.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    patched: dict[int, interpreter._LangPatchScope] = {}

    def patch(function: Callable[..., object]) -> interpreter._LangPatchScope:
        module = id(function.__globals__)
        if module not in patched:
            patched[module] = interpreter_patch(function)
        return interpreter._LangPatchScope()  # has nothing to undo

    interpreter_patch, interpreter._patch_lang = interpreter._patch_lang, patch
    yield
    interpreter._patch_lang = interpreter_patch
    for scope in reversed(patched.values()):
        scope.restore()
