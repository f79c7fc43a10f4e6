"""Makes Triton interpret kernels. It decides when a kernel is defined, so this must run first.

On a machine with a CUDA device, the same tests run the compiled kernels.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

KERNELS = "engine.backends.custom.frameworks.torch.kernels.base"
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
