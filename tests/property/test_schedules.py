"""Random schedules on the native kernels, of which half speculate, give the tokens of each request
alone.
"""

import pytest

from tests.property.run_schedules import run


@pytest.mark.parametrize(
    "num_schedules",
    [20, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])],
)
def test_tokens_do_not_depend_on_the_schedule(num_schedules: int) -> None:
    result = run("tiny", num_schedules, seed=1)
    assert not result["mismatches"], f"the first failing schedule is {result['first_failing']}"
    assert result["compared"] > num_schedules and result["accepted"] > num_schedules
    assert result["by_model"] > num_schedules / 2


@pytest.mark.parametrize(
    "num_schedules",
    [20, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])],
)
def test_tokens_with_adapters_do_not_depend_on_the_schedule(num_schedules: int) -> None:
    """Rows of several LoRA adapters and of the base model, whose prompts are the same. Sequences of
    adapters are preempted too.
    """
    result = run("adapters", num_schedules, seed=1)
    assert not result["mismatches"], f"the first failing schedule is {result['first_failing']}"
    assert result["compared"] > num_schedules and result["mixes"] > num_schedules
    assert result["hits"] and result["adapter_returns"]
