"""The CUDA runner's own logic, its kernels interpreted and its graphs replaced by plain calls."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.backends.custom.frameworks.torch.execution import cuda_runner, graphs, staging
from engine.backends.custom.frameworks.torch.execution.build import build_runner
from engine.backends.custom.frameworks.torch.execution.cuda_runner import CudaRunner
from engine.backends.custom.frameworks.torch.kernels import attention_triton
from engine.backends.custom.frameworks.torch.models.loading import build_model
from engine.backends.custom.runtime.seam import ModelRunner, RunnerConfig
from engine.backends.custom.weights.model import open_model
from tests.parity import tiny_models
from tests.parity.seam_driver import SeamDriver, sampling_inputs

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there the runner itself can be tested"
)
CPU = torch.device("cpu")
LENGTHS = (21, 5, 1)


class Recorded:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class FakeCapturer:
    """As a real one does, it gives a step new outputs, and nothing is in them yet."""

    runner: CudaRunner

    def __init__(self, device: torch.device) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Recorded:
        drawn = self.runner._last_token.clone()
        work()
        self.runner._last_token.copy_(drawn)
        for step in self.runner._steps.values():
            if step.logits is not None:
                step.logits = torch.full_like(step.logits, float("nan"))
        return Recorded(work)


class DoneEvent:
    def query(self) -> bool:
        return True

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    # Interpreted programs that find nothing to do take time as well.
    monkeypatch.setattr(attention_triton, "SPARE_SPANS", 4)
    monkeypatch.setattr(cuda_runner, "TOKEN_SIZES", (4, 16))
    monkeypatch.setattr(cuda_runner, "Capturer", FakeCapturer)
    monkeypatch.setattr(torch.cuda, "Event", DoneEvent)
    monkeypatch.setattr(staging, "_page_locked", lambda size: torch.zeros(size, dtype=torch.int32))
    monkeypatch.setattr(staging.Pinned, "__init__", lambda self, tensor: _fill(self, tensor))


def _fill(pinned: staging.Pinned, tensor: torch.Tensor) -> None:
    pinned.tensor, pinned.copied, pinned.array = tensor, DoneEvent(), tensor.numpy()


def config(attention: str) -> RunnerConfig:
    return RunnerConfig(
        device="cpu",
        dtype="float32",
        block_size=4,
        num_blocks=128,
        max_slots=6,
        max_seq_len=tiny_models.MAX_POSITION,
        num_threads=1,
        attention=attention,
    )


def runners(name: str, folder: Path) -> tuple[CudaRunner, ModelRunner]:
    _, path = tiny_models.save(name, folder)
    source = open_model(path)
    model = build_model(source.config, source.weights, tiny_models.MAX_POSITION, CPU, torch.float32)
    ours = CudaRunner(model, config("triton"), CPU, torch.float32)
    ours._capturer.runner = ours  # type: ignore[attr-defined]
    return ours, build_runner(source, config("reference"))


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "llama",
        pytest.param("mistral-window", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.slow),
    ],
)
def test_generation_equals_the_reference(name: str, tmp_path: Path) -> None:
    generated = []
    for runner in runners(name, tmp_path):
        driver = SeamDriver(runner)
        texts = [tiny_models.text(length, seed) for seed, length in enumerate(LENGTHS)]
        generated.append(driver.generate([driver.add(text) for text in texts], 3, chunk=9))
    assert generated[0] == generated[1]


def test_a_token_in_flight_is_taken_from_the_device(tmp_path: Path) -> None:
    runner, oracle = runners("llama", tmp_path)
    plain = SeamDriver(oracle)
    expected = plain.generate([plain.add(tiny_models.text(9, 0))], 3)
    driver = SeamDriver(runner)
    track = driver.add(tiny_models.text(9, 0))
    found = []
    for count in (9, 1, 1):
        handle = runner.forward(driver.inputs([(track, count)]))
        sampling = sampling_inputs([0], [track.slot], [len(track.tokens)])
        found.append(runner.sample(handle, sampling).wait().tokens.tolist()[0])
        track.num_computed += count
        track.tokens.append(0)
        track.in_flight = True
    assert [found] == expected


def test_what_is_asked_for_beside_tokens(tmp_path: Path) -> None:
    outputs = []
    for runner in runners("llama", tmp_path):
        driver = SeamDriver(runner)
        tracks = [driver.add(tiny_models.text(length, length)) for length in (7, 3)]
        outputs.append(
            driver.step(
                [(track, len(track.tokens)) for track in tracks],
                temperature=[0.0, 0.7],
                num_logprobs=[2, -1],
                hidden_rows=[1],
            )
        )
    ours, reference = outputs
    assert ours.tokens.tolist() == reference.tokens.tolist()
    np.testing.assert_allclose(ours.logprobs, reference.logprobs, atol=1e-4)
    np.testing.assert_allclose(ours.hidden, reference.hidden, atol=1e-4)


def test_a_row_that_is_not_finite_is_told_and_erased(tmp_path: Path) -> None:
    runner, _ = runners("llama", tmp_path)
    driver = SeamDriver(runner)
    good, bad = driver.add(tiny_models.text(5, 0)), driver.add(tiny_models.text(6, 1))
    embedded = runner._model.embed.weight
    spared = next(token for token in bad.tokens if token not in good.tokens)
    with torch.no_grad():
        embedded[spared] = float("nan")
    output = driver.step([(good, 5), (bad, 6)])
    assert output.finite.tolist() == [True, False]
    assert bool(torch.isfinite(runner._cache.slots[:, 4:]).all())


def test_sizes_of_graphs_cover_every_batch() -> None:
    for most in (1, 3, 16, 200, 256, 300, 1024):
        sizes = graphs.row_sizes(most)
        assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == most
        assert all(graphs.at_least(sizes, rows) >= rows for rows in range(1, most + 1))
    assert graphs.at_least((1, 2), 3) is None
