"""Fixtures shared by several kinds of tests: the default model, and a live server that serves
it.
"""

import contextlib
import gc
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import httpx._transports.default as httpx_transports
import pytest

from engine.core.observability.logging import HANDLER_NAME as LOG_HANDLER
from engine.core.store.pull import pull
from tests.support.servers.served import ServedEngine, serve
from tests.support.whole_files import WholeFile, settle_garbage

# Read when PyTorch is first imported: spinning threads starve other processes on the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Read when JAX first compiles: tests compile much code and run each piece only briefly.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# jsonschema would make a parser of IRIs on import, which takes seconds; no test has that format.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
# A new client reads all certificates that the system trusts: 60 ms, and tests make thousands.
httpx_transports.create_ssl_context = cache(httpx_transports.create_ssl_context)
with contextlib.suppress(ModuleNotFoundError):  # a machine for GPU tests may have no server
    import_module("tests.support.servers.lazy_routes").make_routes_lazy()
# As a server sets it, whichever tests ran before: tests count the lines that a request logs.
logging.getLogger("httpx").setLevel(logging.WARNING)
# Servers store their data here by default, and not in the data folder of the user who runs the
# tests.
DATA_HOME = tempfile.TemporaryDirectory(prefix="engine-tests-", ignore_cleanup_errors=True)
os.environ["XDG_DATA_HOME"] = DATA_HOME.name


# Frameworks and test modules are a million objects, which every full collection would walk through.
gc.disable()

DEFAULT_MODEL = "smollm2-135m-instruct"

# Files and folders of `make test-integration`: they need programs of other projects, or minutes.
# Single tests of other files have the mark `integration`.
HERE = Path(__file__).parent
INTEGRATION = frozenset(
    HERE / path
    for path in (
        "e2e/apis/test_anthropic_client.py",
        "e2e/apis/test_conformance.py",
        "e2e/apis/test_langchain.py",
        "e2e/apis/test_litellm.py",
        "e2e/cluster",
        "e2e/docs",
        "e2e/engines",
        "e2e/features",
        "kernels",
        "oracle/http/test_served.py",
        "scoreboard",
        "ui",
        "unit/cli/test_terminal.py",
        "unit/core/store/test_pull_wheel.py",
        "unit/routing/test_nodes.py",
        "unit/routing/test_router_engines.py",
        "unit/runtime/tiers/test_tiers_redis.py",
        "unit/tools/test_benchmarks_gpu.py",
        "unit/tools/test_gpu_suite.py",
    )
)
MOVED = sorted(str(path) for path in INTEGRATION if not path.exists())
assert not MOVED, f"no longer there, so it would be part of make test: {MOVED}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--integration",
        choices=("with", "without", "only"),
        default="with",
        help="whether to run the tests of `make test-integration`",
    )
    parser.addoption(
        "--shuffle",
        metavar="SEED",
        help="run the files, and the tests of each, in an order that this decides",
    )


def is_integration(path: Path) -> bool:
    return not INTEGRATION.isdisjoint((path, *path.parents))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test that is to be run are not imported."""
    choice = config.option.integration
    if choice == "with" or collection_path.suffix != ".py":
        return None
    if is_integration(collection_path):
        return choice == "without" or None
    return (choice == "only" and "integration" not in collection_path.read_text()) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.shuffle is not None:
        shuffle(items, config.option.shuffle)
    if config.option.integration == "with":
        return
    wanted = config.option.integration == "only"
    split: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        marked = item.get_closest_marker("integration") is not None
        found = marked or is_integration(item.path)
        split[found == wanted or isinstance(item, WholeFile)].append(item)
    items[:] = split[True]
    config.hook.pytest_deselected(items=split[False])


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """Tests of a file stay together, as they do in every run of the suite."""
    rng = random.Random(seed)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    items[:] = [item for group in groups for item in group]


def pytest_collection_finish() -> None:
    settle_garbage()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A command that a test ran in this process has set up logging to a stream that is closed now,
    and later tests would find the complaints about that in their output.
    """
    root = logging.getLogger()
    for handler in [each for each in root.handlers if each.name == LOG_HANDLER]:
        root.removeHandler(handler)
        root.setLevel(logging.WARNING)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else bindings report what is left at the end as leaks


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file; downloaded on first use, as `engine pull` does."""
    return pull(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def server(default_model: Path) -> Iterator[ServedEngine]:
    """`engine serve` on the default model, started as a user would. It is shared: tests leave it
    idle.
    """
    with serve(DEFAULT_MODEL) as served:
        yield served
