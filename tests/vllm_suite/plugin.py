"""Pytest plugin of the suite. It supplies the names that vLLM's tests import from vLLM.

Few of them are used by tests that only talk to a server: the tokenizer, the size of the vocabulary.
All other names exist, so that a test file can be imported, but raise when they are used.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from excluded import reason

FOLDER = "tests/entrypoints/openai/"
RESULTS = os.environ.get("VLLM_SUITE_RESULTS")
MODEL = Path(os.environ["VLLM_SUITE_MODEL"])  # the GGUF file of the served model


def get_tokenizer(*args: Any, **options: Any) -> Any:
    """The tokenizer of the served model, as Transformers reads it, whatever name a test gives."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)


class ModelConfig:
    def __init__(self, **options: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(get_tokenizer())


class Absent:
    """A name of vLLM that is not supplied."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError("This test needs vLLM itself.")


class HubApi:
    """Downloads nothing. Adapters (LoRA) are not served, so their folders are not read."""

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        return repo_id


class Platform:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: False


SUPPLIED = {
    ("vllm.tokenizers", "get_tokenizer"): get_tokenizer,
    ("vllm.config", "ModelConfig"): ModelConfig,
    ("vllm.platforms", "current_platform"): Platform(),
    ("vllm.transformers_utils.repo_utils", "hf_api"): HubApi,
    ("vllm.model_executor.model_loader.weight_utils", "download_weights_from_hf"): (
        lambda name, **options: name
    ),
}


class StandIn(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SUPPLIED.get((self.__name__, name), type(name, (Absent,), {}))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below `vllm`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())


def _name(path: str) -> str:
    """The name of a test, or of its file, below the folder of vLLM's tests."""
    return path.partition(FOLDER)[2]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    name = _name(str(collection_path))
    return True if name and reason(name) is not None else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if reason(_name(item.nodeid)) is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write each result to a file at once, so that a run can be followed."""
    if RESULTS is None or (report.when != "call" and report.passed):
        return
    with open(RESULTS, "a", encoding="utf-8") as file:
        file.write(f"{report.outcome} {_name(report.nodeid)}\n")
