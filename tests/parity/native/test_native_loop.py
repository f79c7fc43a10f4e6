"""The real runtime over the native framework against Transformers: the same ids under any schedule.

The schedules and prompts are those of the torch framework's test.
"""

from pathlib import Path

import pytest
from msgspec import structs

from engine.core.interfaces.request import GenerateRequest, TokenDelta
from engine.native.execution.build import build_runner
from engine.runtime.scheduler import Scheduler
from engine.runtime.speculation.drafts import Speculation
from tests.parity import tiny_models
from tests.parity.torch.test_torch_loop import (
    BUSY,
    BY_LENGTH,
    SCHEDULES,
    prompts,
    requests,
    run,
    transformers_ids,
)
from tests.support.toy_engine.engine import FixedPrice

# Each of these has something that no other of them has.
QUICK = (
    *("gpt2", "llama", "gemma2", "cohere2", "mpt", "gpt_oss", "deepseek_v3"),
    *("lfm2", "nemotron_h", "qwen3_next"),
)


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in tiny_models.ALL
        if name not in BY_LENGTH
    ],
)
def test_every_schedule_generates_the_same_ids_as_transformers(name: str, tmp_path: Path) -> None:
    model, path = tiny_models.save(name, tmp_path)
    expected = transformers_ids(model)
    for schedule in SCHEDULES if name == "llama" else BUSY:
        options = SCHEDULES[schedule]
        deltas, _ = run(path, "cpu", requests(), **options, block_size=16, build=build_runner)
        ids: list[list[int]] = [[] for _ in prompts()]
        for delta in deltas:
            ids[int(delta.request_id)].extend(delta.token_ids)
        assert ids == expected, schedule
        if schedule == "one at a time":
            assert sum(delta.num_cached for delta in deltas) > 0, "no prefix was reused"


# Each of these has arithmetic that no other of them has, and no layer that keeps a state.
VERIFIED = ("llama", "gemma2", "mpt", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("name", VERIFIED)
def test_speculation_changes_no_bit_of_a_logprob(name: str, tmp_path: Path) -> None:
    """The logprobs of a row with a draft equal those of steps with one token each."""
    _, path = tiny_models.save(name, tmp_path)
    sampling = {"logprobs": 3, "presence_penalty": 0.3, "seed": 1}
    asked = [
        structs.replace(
            each, params=structs.replace(each.params, temperature=0.9 * (index % 2), **sampling)
        )
        for index, each in enumerate(requests())
    ]
    plain, _ = outputs(path, asked)
    expecting = [
        structs.replace(each, expected=tuple(token for token, _ in plain[each.request_id]))
        for each in asked
    ]
    verified, num_accepted = outputs(path, expecting)
    assert num_accepted > 0
    assert verified == plain


def outputs(path: Path, asked: list[GenerateRequest]) -> tuple[dict[str, list], int]:
    """The tokens and logprobs of each request, and the number of accepted draft tokens."""
    found: list[Speculation] = []

    def speculate(scheduler: Scheduler) -> None:
        if asked[0].expected:
            scheduler.attach(Speculation(scheduler.kv, FixedPrice()))
            found.append(scheduler.find(Speculation))

    shape = {"num_blocks": 64, "max_slots": 4, "budget": 64, "block_size": 16}
    deltas, _ = run(path, "cpu", asked, **shape, build=build_runner, prepare=speculate)
    results: dict[str, list[tuple[int, TokenDelta]]] = {}
    for delta in deltas:
        pairs = zip(delta.token_ids, delta.logprobs or (), strict=True)
        results.setdefault(delta.request_id, []).extend(pairs)
    return results, sum(each.num_accepted for each in found)
