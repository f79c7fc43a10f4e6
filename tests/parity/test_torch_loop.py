"""The real runtime over the real framework, beside Transformers: the same ids whatever the
schedule.

One set of prompts, with shared prefixes, is generated under schedules that batch, chunk, share,
preempt and overlap; every one of them must give what `generate` gives for each prompt alone.
"""

from pathlib import Path

import pytest
import torch

from engine.backends.custom.frameworks.torch.execution.build import build_runner
from engine.backends.custom.runtime.block_pool import BlockPool
from engine.backends.custom.runtime.budget import StepBudget
from engine.backends.custom.runtime.kv_cache import KVCache
from engine.backends.custom.runtime.loop import EngineLoop
from engine.backends.custom.runtime.radix_cache import RadixCache
from engine.backends.custom.runtime.scheduler import Scheduler
from engine.backends.custom.runtime.seam import RunnerConfig
from engine.backends.custom.weights.model import open_model
from engine.core.interfaces.request import Deltas, GenerateRequest, SamplingParams
from tests.parity import tiny_models
from tests.toy_engine import ListChannel

NUM_NEW = 12
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
SCHEDULES = {
    "together": {"num_blocks": 400, "max_slots": 16, "budget": 512},
    "one at a time": {"num_blocks": 400, "max_slots": 1, "budget": 512},
    "in small chunks": {"num_blocks": 400, "max_slots": 4, "budget": 7},
    "without sharing": {"num_blocks": 400, "max_slots": 16, "budget": 64, "sharing": False},
    "in a pool too small": {"num_blocks": 20, "max_slots": 8, "budget": 64},
}


def prompts() -> list[list[int]]:
    shared = tiny_models.text(24, seed=90)
    tails = [tiny_models.text(length, seed) for seed, length in enumerate((1, 3, 9, 14))]
    return [shared + tail for tail in tails] + tails + [shared]


def generate(path: Path, device: str, *, num_blocks, max_slots, budget, sharing=True):
    """Every prompt's ids, and how often something was preempted."""
    config = RunnerConfig(
        device=device,
        dtype="float32",
        block_size=4,
        num_blocks=num_blocks + 1,
        max_slots=max_slots,
        max_seq_len=tiny_models.MAX_POSITION,
        num_threads=1,
    )
    runner = build_runner(open_model(path), config)
    pool = BlockPool(config.num_blocks)
    kv = KVCache(pool, RadixCache(pool, config.block_size), config.block_size, sharing=sharing)
    scheduler = Scheduler(kv, max_slots)
    channel = ListChannel()
    loop = EngineLoop(scheduler, runner, channel, StepBudget(budget, max_slots), 1000)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW)
    for number, prompt in enumerate(prompts()):
        channel.inbox.append(
            GenerateRequest(request_id=str(number), prompt=tuple(prompt), params=params)
        )
    loop.turn(0.0)
    while scheduler.has_work:
        loop.turn(0.0)
        scheduler.check()
    loop.turn(0.0)
    ids: list[list[int]] = [[] for _ in prompts()]
    for message in channel.outbox:
        if isinstance(message, Deltas):
            for delta in message.deltas:
                ids[int(delta.request_id)].extend(delta.token_ids)
    assert pool.num_free + pool.num_evictable == pool.num_usable
    return ids, scheduler.num_preemptions


def transformers_ids(model) -> list[list[int]]:
    expected = []
    for prompt in prompts():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    return expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral-window", "qwen2", "qwen3"])
def test_every_schedule_gives_what_transformers_gives(name: str, device: str, tmp_path: Path):
    model, path = tiny_models.save(name, tmp_path)
    expected = transformers_ids(model)
    for schedule, options in SCHEDULES.items():
        ids, num_preemptions = generate(path, device, **options)
        assert ids == expected, schedule
        assert (num_preemptions > 0) == (schedule == "in a pool too small"), schedule
