"""Models with sliding windows whose windowed layers free their blocks, against Transformers.

The pool of the windowed layers is too small for a whole context.
"""

from pathlib import Path

import pytest
import torch

from engine.core import faults
from engine.core.faults import Fault
from engine.core.interfaces.request import GenerateRequest, SamplingParams
from engine.ipc.options import EngineOptions
from engine.runners.entry import framework_entry
from engine.runtime.groups.windows import WindowGroup, min_window_blocks
from engine.runtime.model_runner import RunnerConfig
from engine.weights.model import open_model
from engine.worker.loading import load_runner
from engine.worker.main import build_scheduler
from tests.parity import tiny_models
from tests.parity.torch.test_torch_loop import (
    DEVICES,
    SCHEDULES,
    prompts,
    requests,
    run,
    transformers_ids,
)
from tests.support.references.conformance_bench import Bench, Schedule

LONG = 70
BLOCK_SIZE = 16
# Two kinds of layers; sinks and experts; windows in all layers.
FAMILIES = ("gemma3", "gpt_oss", "mistral-window")
FRAMEWORKS = ("native", "torch")


def bench(framework: str, path: Path, max_slots: int = 2, budget: int = 24) -> Bench:
    """The runtime around a runner whose windowed pool has the fewest blocks for its slots."""
    source = open_model(path)
    assert source.config.window is not None
    each = min_window_blocks(source.config.window, BLOCK_SIZE, 1)
    config = RunnerConfig(
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=40,
        num_window_blocks=max_slots * each + 2,
        max_slots=max_slots,
        max_seq_len=tiny_models.MAX_POSITION,
        num_threads=1,
    )
    runner = framework_entry(framework).build_runner(source, config)
    assert runner.spec.window == source.config.window
    return Bench(runner, Schedule(budget=budget))


def greedy(name: str, prompt: list[int], max_tokens: int = LONG) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt=tuple(prompt), params=params)


def generated(model, prompt: list[int], count: int = LONG) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        attention_mask=torch.ones(1, len(prompt)),  # a 0 in the prompt is no padding
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_windowed_layers_equal_transformers_for_long_answers_and_cache_hits(
    name: str, framework: str, tmp_path: Path
) -> None:
    model, path = tiny_models.save(name, tmp_path)
    texts = [tiny_models.text(length, seed) for seed, length in enumerate((40, 3))]
    engine = bench(framework, path)
    pool = engine.scheduler.kv.find(WindowGroup).pool
    assert pool.num_usable < LONG // BLOCK_SIZE * 2
    outcomes = engine.run([greedy(str(index), text) for index, text in enumerate(texts)])
    for index, text in enumerate(texts):
        assert outcomes[str(index), 0].tokens == generated(model, text), index
    # The conversation goes on. Only the end of its cached prefix has windowed blocks.
    longer = texts[0] + outcomes["0", 0].tokens + [5]
    again = engine.run([greedy("more", longer, 12)])["more", 0]
    assert again.num_cached >= BLOCK_SIZE * 4
    assert again.tokens == generated(model, longer, 12)
    assert pool.num_free + pool.num_evictable == pool.num_usable


@pytest.mark.parametrize("framework", [*FRAMEWORKS, "jax"])
def test_the_windowed_memory_plan_reaches_runner_and_scheduler(
    framework: str, tmp_path: Path
) -> None:
    _, path = tiny_models.save("gemma3", tmp_path)
    options = EngineOptions(
        model_path=str(path), framework=framework, device="cpu", max_slots=4, max_batch_tokens=16
    )
    runner, config, plan = load_runner(open_model(path), options)
    assert 1 < plan.num_window_blocks == config.num_window_blocks < plan.num_blocks
    windows = build_scheduler(runner.spec, options, plan.bytes_per_token).kv.find(WindowGroup)
    assert windows.pool.num_blocks == plan.num_window_blocks and windows.max_row == 16
    runner.close()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_failed_step_is_repeated_with_its_windowed_blocks(framework: str, tmp_path: Path) -> None:
    model, path = tiny_models.save("gemma3", tmp_path)
    engine = bench(framework, path)
    text = tiny_models.text(30, 0)
    engine.turn(greedy("only", text))
    for _ in range(8):
        with faults.planned(Fault("forward")):
            engine.turn()
        engine.turn()
    assert engine.finish()["only", 0].tokens == generated(model, text)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_generates_the_same_ids_as_transformers(
    name: str, device: str, tmp_path: Path
) -> None:
    model, path = tiny_models.save(name, tmp_path)
    expected = transformers_ids(model)
    for schedule, options in SCHEDULES.items():
        deltas, _ = run(path, device, requests(), **options, num_window_blocks=24)
        ids: list[list[int]] = [[] for _ in prompts()]
        for delta in deltas:
            ids[int(delta.request_id)].extend(delta.token_ids)
        assert ids == expected, schedule
