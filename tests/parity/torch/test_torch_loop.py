"""The real runtime over the torch framework against Transformers: the same ids under any schedule.

One set of prompts with shared prefixes is generated under schedules that batch, chunk, share,
preempt and overlap. Each must give the ids that `generate` gives for each prompt alone.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine.core.interfaces.request import Deltas, GenerateRequest, SamplingParams, TokenDelta
from engine.runtime.block_pool import BlockPool
from engine.runtime.budget import StepBudget
from engine.runtime.groups.states import state_group
from engine.runtime.groups.windows import window_group
from engine.runtime.kv_cache import KVCache
from engine.runtime.loop import EngineLoop
from engine.runtime.model_runner import RunnerConfig
from engine.runtime.radix_cache import RadixCache
from engine.runtime.scheduler import Scheduler
from engine.runtime.speculation.drafts import Speculation
from engine.torch.execution.build import build_runner
from engine.weights.model import open_model
from tests.parity import tiny_models
from tests.support.toy_engine.engine import FixedPrice, ListChannel

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
# Each of these has something that no other of them has.
QUICK = (
    *("gpt2", "llama", "mistral-window", "qwen2", "qwen3", "gemma2", "cohere2", "mpt", "gpt_oss"),
    *("lfm2", "nemotron_h", "qwen3_next"),
)
# Sequences that share blocks, in chunks, and sequences that are preempted. The other schedules do
# not depend on what a layer computes, so one model is enough for them.
BUSY = ("in small chunks", "in a pool too small")
# Transformers rotates by the length of the text at hand, the engine by the longest length served.
BY_LENGTH = ("llama-dynamic", "phi3-long")
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


def run(
    path: Path,
    device: str,
    requests: list[GenerateRequest],
    *,
    num_blocks,
    max_slots,
    budget,
    sharing=True,
    block_size=4,
    num_window_blocks=0,
    build=build_runner,
    prepare: Callable[[Scheduler], None] = lambda scheduler: None,
) -> tuple[list[TokenDelta], int]:
    """Everything that came back, and how often something was preempted."""
    config = RunnerConfig(
        device=device,
        dtype="float32",
        block_size=block_size,
        num_blocks=num_blocks + 1,
        num_window_blocks=num_window_blocks,
        max_slots=max_slots,
        max_seq_len=tiny_models.MAX_POSITION,
        num_threads=1,
        num_checkpoints=16,
    )
    runner = build(open_model(path), config)
    pool = BlockPool(config.num_blocks)
    windows = window_group(runner.spec, budget)
    states = state_group(runner.spec) if sharing else None
    groups = [each for each in (windows, states) if each]
    radix = RadixCache(pool, config.block_size, columns=[each.column for each in groups])
    kv = KVCache(pool, radix, config.block_size, sharing=sharing, groups=groups)
    scheduler = Scheduler(kv, max_slots)
    prepare(scheduler)
    channel = ListChannel()
    loop = EngineLoop(scheduler, runner, channel, StepBudget(budget, max_slots), 1000)
    channel.inbox.extend(requests)
    loop.turn(0.0)
    while scheduler.has_work:
        loop.turn(0.0)
        scheduler.check()
    loop.turn(0.0)
    assert pool.num_free + pool.num_evictable == pool.num_usable
    deltas = [d for m in channel.outbox if isinstance(m, Deltas) for d in m.deltas]
    return deltas, scheduler.num_preemptions


def requests(**fields) -> list[GenerateRequest]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, **fields.pop("params", {}))
    return [
        GenerateRequest(request_id=str(number), prompt=tuple(prompt), params=params, **fields)
        for number, prompt in enumerate(prompts())
    ]


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
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in tiny_models.ALL
        if name not in BY_LENGTH
    ],
)
def test_every_schedule_generates_the_same_ids_as_transformers(
    name: str, device: str, tmp_path: Path
):
    model, path = tiny_models.save(name, tmp_path)
    expected = transformers_ids(model)
    for schedule in SCHEDULES if name == "llama" else BUSY:
        deltas, num_preemptions = run(path, device, requests(), **SCHEDULES[schedule])
        ids: list[list[int]] = [[] for _ in prompts()]
        for delta in deltas:
            ids[int(delta.request_id)].extend(delta.token_ids)
        assert ids == expected, schedule
        assert (num_preemptions > 0) == (schedule == "in a pool too small"), schedule
        if schedule == "one at a time":
            assert sum(delta.num_cached for delta in deltas) > 0, "no prefix was reused"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_prompt_logprobs_and_pooled_vectors_equal_transformers(name, device, tmp_path: Path):
    model, path = tiny_models.save(name, tmp_path)
    for schedule, options in SCHEDULES.items():
        scored = requests(params={"logprobs": 3, "score_prompt": True})
        vectors = [
            msgspec.structs.replace(each, request_id=f"v{each.request_id}", pools=True)
            for each in requests(params={})
        ]
        deltas, _ = run(path, device, [*scored, *vectors], **options)
        scores = {d.request_id: d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None}
        pooled = {d.request_id: d.vector for d in deltas if d.vector is not None}
        for number, prompt in enumerate(prompts()):
            with torch.no_grad():
                out = model(torch.tensor([prompt]), output_hidden_states=True)
            wanted = out.logits[0].log_softmax(-1)
            got = scores[str(number)]
            assert len(got) == len(prompt) - 1, schedule
            for position, score in enumerate(got):
                row = wanted[position]
                assert abs(score.logprob - float(row[prompt[position + 1]])) < 1e-4, schedule
                np.testing.assert_allclose(
                    score.top_logprobs, row.topk(3).values.numpy(), atol=1e-4, err_msg=schedule
                )
            state = np.frombuffer(pooled[f"v{number}"], np.float32)
            np.testing.assert_allclose(
                state, out.hidden_states[-1][0, -1].numpy(), atol=1e-4, err_msg=schedule
            )


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_speculation_changes_no_token(name: str, tmp_path: Path):
    """On the CPU, because a GPU may round the tokens of a longer row differently."""
    _, path = tiny_models.save(name, tmp_path)
    sampling = {"temperature": 0.9, "presence_penalty": 0.3, "seed": 1}
    asked = [
        msgspec.structs.replace(each, params=msgspec.structs.replace(each.params, **sampling))
        for each in requests()
    ]
    shape = {"num_blocks": 64, "max_slots": 4, "budget": 64}
    plain = tokens_of(run(path, "cpu", asked, **shape)[0])
    expecting = [
        msgspec.structs.replace(each, expected=tuple(plain[each.request_id])) for each in asked
    ]
    made: list[Speculation] = []

    def speculate(scheduler: Scheduler) -> None:
        made.append(Speculation(scheduler.kv, FixedPrice()))
        scheduler.attach(made[0])

    assert tokens_of(run(path, "cpu", expecting, **shape, prepare=speculate)[0]) == plain
    assert made[0].num_accepted > 0


def tokens_of(deltas: list[TokenDelta]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for delta in deltas:
        found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return found
