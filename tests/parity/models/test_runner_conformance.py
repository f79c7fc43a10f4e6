"""The runner conformance class over every framework that this machine can run."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.runners.entry import framework_entry
from engine.runtime.model_runner import F32, ModelRunner, RunnerConfig
from engine.weights.model import open_model
from tests.parity import tiny_models
from tests.support.references.runner_conformance import RunnerConformance

NAN_TOKEN = 50  # not among the values that opening a model looks at


@cache
def reference(name: str) -> PreTrainedModel:
    # Two layers, so that one has the cache of another beside its own.
    changes = {"num_hidden_layers": 2} if name == "llama" else {}
    model = tiny_models.make(name, **changes)
    with torch.no_grad():
        model.get_input_embeddings().weight[NAN_TOKEN] = torch.nan
    return model


@cache
def checkpoint(name: str) -> Path:
    path = Path(mkdtemp()) / name
    reference(name).save_pretrained(path)
    return path


class OfFramework(RunnerConformance):
    framework: str
    model = "llama"
    num_threads: int | None = 1
    num_window_blocks = 0
    nan_token = NAN_TOKEN

    @classmethod
    def make_runner(cls) -> ModelRunner:
        config = RunnerConfig(
            device="cpu",
            dtype="float32",
            block_size=16,
            num_blocks=64,
            num_window_blocks=cls.num_window_blocks,
            max_slots=8,
            max_seq_len=tiny_models.MAX_POSITION,
            num_threads=cls.num_threads,
        )
        return framework_entry(cls.framework).build_runner(
            open_model(checkpoint(cls.model)), config
        )

    @classmethod
    def logits(cls, tokens: Sequence[int]) -> F32:
        with torch.no_grad():
            model = reference(cls.model)
            found: F32 = model(torch.tensor([tokens])).logits[0].numpy().astype(np.float32)
        return found


class Windowed(OfFramework):
    """Two of three layers have a sliding window, and blocks of their own. Their pool is so small
    that sequences wait for it.
    """

    model = "ministral"
    num_window_blocks = 18
    # Windows make no difference to samplers.
    test_llama_cpp_sampler_chains_equal_the_reference = None


class TestNative(OfFramework):
    framework = "native"


class TestNativeWindows(Windowed):
    framework = "native"


class TestTorch(OfFramework):
    framework = "torch"


class TestTorchWindows(Windowed):
    framework = "torch"


class TestJAX(OfFramework):
    framework = "jax"
    num_threads = None  # XLA's own choice


@pytest.mark.integration
class TestJAXWindows(Windowed):
    framework = "jax"
    num_threads = None


@pytest.mark.integration
class TestTinygrad(OfFramework):
    framework = "tinygrad"
