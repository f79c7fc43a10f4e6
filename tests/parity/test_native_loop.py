"""The real runtime over the native framework against Transformers: the same ids under any schedule.

The schedules and prompts are those of the torch framework's test.
"""

from pathlib import Path

import pytest

from engine.backends.custom.frameworks.native.execution.build import build_runner
from tests.parity import tiny_models
from tests.parity.test_torch_loop import (
    BUSY,
    BY_LENGTH,
    SCHEDULES,
    prompts,
    requests,
    run,
    transformers_ids,
)

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
def test_every_schedule_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
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
