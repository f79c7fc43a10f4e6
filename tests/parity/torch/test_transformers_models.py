"""Transformers models in our loop give the ids that `generate` gives for each prompt alone, in
every runner and under any schedule.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.backends.transformers.checkpoint import open_checkpoint
from engine.backends.transformers.fitting import Fitted, ModelToFit, fit
from engine.backends.transformers.loading import load_model
from engine.core.errors import ConfigError
from engine.core.interfaces.request import (
    Deltas,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
)
from engine.ipc.options import EngineOptions
from engine.runtime.block_pool import BlockPool
from engine.runtime.budget import StepBudget
from engine.runtime.kv_cache import KVCache
from engine.runtime.loop import EngineLoop
from engine.runtime.radix_cache import RadixCache
from engine.runtime.scheduler import Scheduler
from engine.torch.execution.build import find_device
from tests.parity import tiny_models, tiny_zoo
from tests.support.toy_engine.engine import ListChannel

NUM_NEW = 8
WAYS = {
    **{name: way for name, (way, _) in tiny_zoo.MODELS.items()},
    "llama": "paged",
    "gpt2": "paged",
    "qwen2": "paged",
    "mistral-window": "paged",
    "llama-yarn": "paged",
    "llama-dynamic": "own",  # its rotation would depend on the longest neighbour
}
# The others take the longer run: they differ from one of these in what their layers compute only.
QUICK = ("llama", "gpt2", "qwen2", "gpt_neox", "opt", "gemma3", "bloom", "mamba")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WAYS]
SCHEDULES = {
    "together": {"num_blocks": 400, "max_slots": 16, "budget": 512},
    "in small chunks": {"num_blocks": 400, "max_slots": 4, "budget": 7},
    "in a pool too small": {"num_blocks": 16, "max_slots": 8, "budget": 64},
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


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more, and wait for each other where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def fitted(path: Path, attention: str = "auto", device: str = "cpu") -> Fitted:
    options = EngineOptions(
        model_path=str(path),
        framework="transformers",
        block_size=4,
        max_slots=16,
        attention=attention,
    )
    checkpoint = open_checkpoint(path)
    found = find_device(device, "float32")
    model = load_model(checkpoint, torch.device(device), torch.float32)
    return fit(ModelToFit(model, checkpoint.shape, options, found))


def loop_of(found: Fitted, num_blocks: int, max_slots: int, budget: int) -> EngineLoop:
    pool = BlockPool(num_blocks + 1)
    kv = KVCache(pool, RadixCache(pool, 4), 4, sharing=found.shares)
    scheduler = Scheduler(kv, max_slots)
    return EngineLoop(scheduler, found.runner, ListChannel(), StepBudget(budget, max_slots), 1000)


def deltas_of(loop: EngineLoop, requests: list[GenerateRequest]) -> dict[str, list[TokenDelta]]:
    """Everything that comes back for each request, all of them asked for at once."""
    channel = loop._channel
    channel.inbox.extend(requests)
    loop.turn(0.0)
    while loop.scheduler.has_work:
        loop.turn(0.0)
        loop.scheduler.check()
    found: dict[str, list[TokenDelta]] = {request.request_id: [] for request in requests}
    for message in channel.outbox:
        if isinstance(message, Deltas):
            for delta in message.deltas:
                found[delta.request_id].append(delta)
    return found


def answers(loop: EngineLoop, requests: list[GenerateRequest]) -> list[list[int]]:
    """Token ids of each request."""
    found = deltas_of(loop, requests).values()
    assert all(deltas[-1].finish_reason in ("stop", "length") for deltas in found)
    return [[token for delta in deltas for token in delta.token_ids] for deltas in found]


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


@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_equal_transformers_generate_under_every_schedule(models, name):
    expected = [generated(models.theirs(name), prompt) for prompt in prompts()]
    found = models.ours(name)
    assert ("paged" if found.shares else "own") == WAYS[name]
    requests = [greedy(prompt, number) for number, prompt in enumerate(prompts())]
    for schedule, limits in SCHEDULES.items():
        loop = loop_of(found, **limits)
        assert answers(loop, requests) == expected, schedule
        assert (loop.scheduler.num_preemptions > 0) == (schedule == "in a pool too small")
        assert (loop.stats().prefix_hits > 0) == found.shares


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUICK)
def test_a_gpu_gives_the_same_ids_as_the_cpu(models, name):
    """Steps are launched there before the last one's tokens are known."""
    expected = [generated(models.theirs(name), prompt) for prompt in prompts()]
    found = fitted(models.path(name), device="cuda")
    assert found.runner.spec.depth == (1 if found.shares else 0)
    requests = [greedy(prompt, number) for number, prompt in enumerate(prompts())]
    for schedule, limits in SCHEDULES.items():
        assert answers(loop_of(found, **limits), requests) == expected, schedule


BOTH = ("gpt_neox", "mamba")  # computed together, and one by one
ROOMY = SCHEDULES["together"]


@pytest.mark.parametrize("name", BOTH)
def test_a_request_gets_the_same_tokens_alone_and_batched(models, name):
    """Seeds, penalties, biases, filters and log-probabilities are each request's own."""
    found = models.ours(name)
    ways = (
        {"temperature": 0.9, "seed": 5, "top_p": 0.8},
        {"temperature": 1.3, "seed": 5, "min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 0.7, "seed": 6, "top_k": 9, "presence_penalty": 1.0},
        {"temperature": 0.0, "logit_bias": {7: 8.0, 9: -100.0}, "frequency_penalty": 0.5},
    )
    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt=tuple(prompt),
            params=SamplingParams(max_tokens=NUM_NEW, logprobs=3, **ways[number % len(ways)]),
        )
        for number, prompt in enumerate(prompts())
    ]
    together = deltas_of(loop_of(found, **ROOMY), requests)
    for request in requests:
        alone = deltas_of(loop_of(found, **ROOMY), [request])[request.request_id]
        beside = together[request.request_id]
        assert [each.token_ids for each in alone] == [each.token_ids for each in beside]
        for one, other in zip(alone, beside, strict=True):
            assert one.logprobs[0].top_logprobs == pytest.approx(
                other.logprobs[0].top_logprobs, abs=1e-4
            )


@pytest.mark.parametrize("name", BOTH)
def test_prompt_logprobs_and_pooled_states_equal_transformers(models, name):
    theirs, prompt = models.theirs(name), tiny_models.text(40)
    params = SamplingParams(max_tokens=1, logprobs=0, score_prompt=True)
    requests = [
        GenerateRequest(request_id="scored", prompt=tuple(prompt), params=params),
        GenerateRequest(
            request_id="pooled", prompt=tuple(prompt), params=SamplingParams(), pools=True
        ),
    ]
    # A budget that cuts the prompt: what is scored has to be computed then and there.
    found = deltas_of(loop_of(models.ours(name), 400, 4, budget=15), requests)
    with torch.no_grad():
        output = theirs(torch.tensor([prompt]), output_hidden_states=True)
    expected = output.logits[0].log_softmax(-1)[range(39), prompt[1:]]
    scores = [each.logprob for each in found["scored"][0].prompt_logprobs]
    assert scores == pytest.approx(expected.tolist(), abs=1e-3)
    vector = np.frombuffer(found["pooled"][0].vector, np.float32)
    np.testing.assert_allclose(vector, output.hidden_states[-1][0, -1].numpy(), atol=1e-3)


def unused_token(expected: list[list[int]]) -> int:
    """One that neither prompts nor answers hold."""
    used = {token for ids in (*prompts(), *expected) for token in ids}
    return max(set(range(3, tiny_models.VOCAB)) - used)


@pytest.mark.parametrize("name", BOTH)
def test_a_request_that_makes_the_model_raise_fails_alone(models, name):
    """What it shared steps with is computed again, from whatever the failed step left."""
    expected = [generated(models.theirs(name), prompt) for prompt in prompts()]
    found = fitted(models.path(name))
    forward = found.runner._model.forward
    poison = unused_token(expected)

    @functools.wraps(forward)
    def fragile(*args, **kwargs):
        if poison in kwargs["input_ids"]:
            raise RuntimeError("this token is too much")
        return forward(*args, **kwargs)

    found.runner._model.forward = fragile
    requests = [greedy(prompt, number) for number, prompt in enumerate(prompts())]
    poisoned = greedy([5, 6, 7], 99)
    params = msgspec.structs.replace(poisoned.params, logit_bias={poison: 1000.0}, min_tokens=5)
    poisoned = msgspec.structs.replace(poisoned, params=params)
    deltas = deltas_of(loop_of(found, **ROOMY), [*requests, poisoned])
    assert deltas.pop("99")[-1].error_code == "inference_error"
    ids = [[token for each in given for token in each.token_ids] for given in deltas.values()]
    assert ids == expected


@pytest.mark.parametrize("name", BOTH)
def test_nan_fails_only_its_request_and_leaves_no_trace_in_the_cache(models, name):
    expected = [generated(models.theirs(name), prompt) for prompt in prompts()]
    found = fitted(models.path(name))
    poison = unused_token(expected)

    def spoil(module, inputs, output):
        return output.masked_fill((inputs[0] == poison)[..., None], float("nan"))

    found.runner._model.get_input_embeddings().register_forward_hook(spoil)
    requests = [greedy(prompt, number) for number, prompt in enumerate(prompts())]
    bad = [greedy([poison, *prompt], 50 + number) for number, prompt in enumerate(prompts())]
    # A pool that the others fill again behind them.
    loop = loop_of(found, num_blocks=60, max_slots=16, budget=64)
    deltas = deltas_of(loop, [*bad, *requests])
    assert all(deltas[each.request_id][-1].error_code == "inference_error" for each in bad)
    ids = [
        [token for delta in deltas[each.request_id] for token in delta.token_ids]
        for each in requests
    ]
    assert ids == expected


def test_the_attention_option_forces_paged_or_own_cache_or_is_refused(models):
    assert not fitted(models.path("llama"), attention="own").shares
    with pytest.raises(ConfigError, match="'paged' does not fit"):
        fitted(models.path("mamba"), attention="paged")
    with pytest.raises(ConfigError, match="auto, paged, own"):
        fitted(models.path("llama"), attention="triton")
