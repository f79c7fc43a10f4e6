"""The runner conformance class over every framework that this machine can run."""

from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp

import torch

from engine.backends.custom.runner_conformance import RunnerConformance
from engine.backends.custom.runtime.seam import ModelRunner, RunnerConfig
from engine.backends.custom.weights.model import open_model
from tests.parity import tiny_models

NAN_TOKEN = 50  # not among the values that opening a model looks at


@cache
def checkpoint() -> Path:
    # Two layers, so that one has the cache of another beside its own.
    model = tiny_models.make("llama", num_hidden_layers=2)
    with torch.no_grad():
        model.get_input_embeddings().weight[NAN_TOKEN] = torch.nan
    path = Path(mkdtemp()) / "llama"
    model.save_pretrained(path)
    return path


class OfFramework(RunnerConformance):
    framework: str
    num_threads: int | None = 1
    nan_token = NAN_TOKEN

    @classmethod
    def make_runner(cls) -> ModelRunner:
        config = RunnerConfig(
            device="cpu",
            dtype="float32",
            block_size=16,
            num_blocks=64,
            max_slots=8,
            max_seq_len=tiny_models.MAX_POSITION,
            num_threads=cls.num_threads,
        )
        module = f"engine.backends.custom.frameworks.{cls.framework}.engine"
        return import_module(module).build_runner(open_model(checkpoint()), config)


class TestNative(OfFramework):
    framework = "native"


class TestTorch(OfFramework):
    framework = "torch"


class TestJAX(OfFramework):
    framework = "jax"
    num_threads = None  # XLA's own choice


class TestTinygrad(OfFramework):
    framework = "tinygrad"
