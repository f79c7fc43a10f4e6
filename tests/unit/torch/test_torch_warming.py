"""What a GPU prepares before the first request: kernels, graphs and weights. No GPU is needed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.runtime.model_runner import BatchInputs, RunnerSpec
from engine.torch import warming
from engine.torch.compiling import compiling_ahead
from engine.torch.execution import step_sizes
from engine.torch.execution.device_sampler import Kind
from engine.torch.execution.step_sizes import Size, all_sizes, row_sizes
from engine.torch.models import upload
from engine.weights.model import open_model
from tests.parity import tiny_models

CPU = torch.device("cpu")


class RecordingRunner:
    spec = RunnerSpec(16, 100, 48, 4096, 50, depth=1)

    def __init__(self) -> None:
        self.is_compiling = False
        self.compiled: list[Size | int] = []
        self.ran: list[Size | int] = []
        self.captured: list[Size] = []
        self.kinds: set[Kind] = set()

    def sizes(self) -> Iterator[Size]:
        return all_sizes(row_sizes(48), step_sizes.TOKEN_SIZES, can_share=True)

    def prepare(self, inputs: BatchInputs, size: Size | None, kinds: Iterable[Kind] = ()) -> None:
        chosen = len(inputs.token_ids) if size is None else size
        (self.compiled if self.is_compiling else self.ran).append(chosen)
        if self.is_compiling:
            self.kinds.update(kinds)

    def capture(self, size: Size, kinds: Iterable[Kind]) -> None:
        assert not self.is_compiling and self.ran[-1] == size, "a step runs before its capture"
        self.captured.append(size)


def test_warm_up_compiles_all_kernels_and_captures_the_usual_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = RecordingRunner()

    @contextmanager
    def compiling(device: torch.device) -> Iterator[None]:
        runner.is_compiling = True
        yield
        runner.is_compiling = False

    monkeypatch.setattr(warming, "compiling_ahead", compiling)
    warming.warm(runner, CPU, max_batch_tokens=8192)
    sizes = list(runner.sizes())
    captured = [size for size in sizes if not size.shares]
    assert runner.captured == captured
    assert {size.rows for size in captured if size.only_decodes} == set(row_sizes(48))
    assert {size.tokens for size in captured if not size.only_decodes} == set(
        step_sizes.TOKEN_SIZES
    )
    assert runner.ran == [*captured, 4608, 8192]
    assert set(runner.compiled) <= {*sizes, 4608, 8192}
    assert {size.shares for size in runner.compiled if isinstance(size, Size)} == {False, True}
    powers = {
        size for size in sizes if size.tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    }
    assert set(runner.compiled) >= {*powers, sizes[0], 4608, 8192}
    assert len(runner.kinds) == 8


@triton.jit
def _double(x_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, 2 * tl.load(x_ptr + index))


def test_a_warm_up_launch_compiles_its_kernel_without_running_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []
    there = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda *_: lambda *_: launched.append("launched"),
        utils=SimpleNamespace(
            load_binary=lambda *_: (0, 0, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 2**20},
        ),
    )
    monkeypatch.setattr(driver, "_active", there)
    x = torch.ones(32)
    with compiling_ahead(CPU):
        out = torch.empty(32)
        for _ in range(2):
            _double[(1,)](x, out, SIZE=32)
        assert out.eq(0).all(), "what no kernel has written is zero"
        assert not launched
    kernels = _double.device_caches[0][0]
    assert len(kernels) == 1
    _double[(1,)](x, out, SIZE=32)
    assert len(kernels) == 1 and launched


def test_stored_weights_are_copied_to_the_device_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: done)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(upload, "_page_locked", lambda size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(upload, "PIECE_BYTES", 1000)
    _, path = tiny_models.save("llama", tmp_path)
    weights = open_model(path).weights
    uploader = upload.Uploader(CPU)
    for name, weight in weights.items():
        assert upload.can_upload(weight, torch.device("cuda")), name
        assert np.array_equal(uploader.upload(weight).float().numpy(), weight.numpy()), name
    uploader.close()


def test_weights_that_need_conversion_are_read_on_the_host(tmp_path: Path) -> None:
    _, path = tiny_models.save("gpt2", tmp_path)  # its matrices are stored transposed
    weight = open_model(path).weights["layers.0.attn.o.weight"]
    assert not upload.can_upload(weight, torch.device("cuda"))
    assert not upload.can_upload(open_model(path).weights["embed.weight"], CPU)
