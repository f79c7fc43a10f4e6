"""Models of Transformers in our loop give the ids that `generate` gives for each prompt alone,
whichever way they are computed and whatever the schedule.
"""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.backends.custom.frameworks.torch.execution.build import find_device
from engine.backends.custom.options import EngineOptions
from engine.backends.custom.runtime.block_pool import BlockPool
from engine.backends.custom.runtime.budget import StepBudget
from engine.backends.custom.runtime.kv_cache import KVCache
from engine.backends.custom.runtime.loop import EngineLoop
from engine.backends.custom.runtime.radix_cache import RadixCache
from engine.backends.custom.runtime.scheduler import Scheduler
from engine.backends.transformers.checkpoint import open_checkpoint
from engine.backends.transformers.fitting import Fitted, Loaded, fit
from engine.backends.transformers.loading import load_model
from engine.core.interfaces.request import Deltas, GenerateRequest, SamplingParams
from tests.parity import tiny_models, tiny_zoo
from tests.toy_engine import ListChannel

NUM_NEW = 12
WAYS = {
    **{name: way for name, (way, _) in tiny_zoo.MODELS.items()},
    "llama": "paged",
    "gpt2": "paged",
    "qwen2": "paged",
    "mistral-window": "paged",
    "llama-yarn": "paged",
    "llama-dynamic": "own",  # its rotation would depend on the longest neighbour
}
SCHEDULES = {
    "together": {"num_blocks": 400, "max_slots": 16, "budget": 512},
    "in small chunks": {"num_blocks": 400, "max_slots": 4, "budget": 7},
    "in a pool too small": {"num_blocks": 20, "max_slots": 8, "budget": 64},
}


class Models:
    """Tiny models, saved and loaded again, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, PreTrainedModel] = {}
        self._fitted: dict[str, Fitted] = {}

    def theirs(self, name: str) -> PreTrainedModel:
        if name not in self._made:
            models = tiny_zoo if name in tiny_zoo.MODELS else tiny_models
            self._made[name] = models.make(name)
            self._made[name].save_pretrained(self._folder / name)
        return self._made[name]

    def ours(self, name: str) -> Fitted:
        if name not in self._fitted:
            self._fitted[name] = fitted(self.path(name))
        return self._fitted[name]

    def path(self, name: str) -> Path:
        self.theirs(name)
        return self._folder / name


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def fitted(path: Path, attention: str = "auto") -> Fitted:
    options = EngineOptions(
        model_path=str(path),
        framework="transformers",
        block_size=4,
        max_slots=16,
        attention=attention,
    )
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    return fit(Loaded(model, checkpoint.shape, options, find_device("cpu", "float32")))


def loop_of(found: Fitted, num_blocks: int, max_slots: int, budget: int) -> EngineLoop:
    pool = BlockPool(num_blocks + 1)
    kv = KVCache(pool, RadixCache(pool, 4), 4, sharing=found.shares)
    scheduler = Scheduler(kv, max_slots)
    return EngineLoop(scheduler, found.runner, ListChannel(), StepBudget(budget, max_slots), 1000)


def answers(loop: EngineLoop, requests: list[GenerateRequest]) -> list[list[int]]:
    """Token ids of each request, all of them asked for at once."""
    channel = loop._channel
    channel.inbox.extend(requests)
    loop.turn(0.0)
    while loop.scheduler.has_work:
        loop.turn(0.0)
        loop.scheduler.check()
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for message in channel.outbox:
        if isinstance(message, Deltas):
            for delta in message.deltas:
                assert delta.finish_reason != "error", delta.error_message
                ids[delta.request_id] += delta.token_ids
    return list(ids.values())


def prompts() -> list[list[int]]:
    shared = tiny_models.text(24, seed=90)
    tails = [tiny_models.text(length, seed) for seed, length in enumerate((1, 3, 9, 14))]
    return [shared + tail for tail in tails] + tails + [shared]


def greedy(prompt: list[int], number: int) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW)
    return GenerateRequest(
        request_id=str(number), prompt=tuple(prompt), params=params, eos_ids=(2,)
    )


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=2, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", WAYS)
def test_greedy_ids_are_those_of_generate_whatever_the_schedule(models, name):
    expected = [generated(models.theirs(name), prompt) for prompt in prompts()]
    found = models.ours(name)
    assert ("paged" if found.shares else "own") == WAYS[name]
    requests = [greedy(prompt, number) for number, prompt in enumerate(prompts())]
    for schedule, limits in SCHEDULES.items():
        loop = loop_of(found, **limits)
        assert answers(loop, requests) == expected, schedule
        assert (loop.scheduler.num_preemptions > 0) == (schedule == "in a pool too small")
        assert (loop.stats().prefix_hits > 0) == found.shares
