"""The default model on every framework in float32: equal greedy ids up to the first near tie."""

import time
from importlib import import_module
from pathlib import Path

import pytest

from engine.core.interfaces.request import GenerateRequest, SamplingParams, TokenLogprobs
from engine.ipc.options import EngineOptions
from engine.tools.profiling import DrivenEngine
from engine.weights.model import open_model

FRAMEWORKS = ("native", "torch", "jax", "tinygrad")
NUM_PROMPTS, NUM_NEW = 32, 64
# Two sums of the same numbers in another order differ by less.
TIE = 1e-3
TEXT = Path(__file__).parents[2] / "data" / "alice.txt"

Answer = list[tuple[int, TokenLogprobs]]


def prompts(model: Path) -> list[tuple[int, ...]]:
    text = import_module("engine.frontend.text_model").load_text(model)
    ids = text.encode_prompt(TEXT.read_text(encoding="utf-8"))
    return [tuple(ids[start : start + 20 + start % 37]) for start in range(0, 61 * NUM_PROMPTS, 61)]


def answers(model: Path, framework: str) -> list[Answer]:
    options = EngineOptions(
        model_path=str(model), framework=framework, dtype="float32", max_seq_len=256, max_slots=8
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=2)
    source = open_model(model)
    engine = DrivenEngine(source, options)
    run = engine.generate(
        [
            GenerateRequest(request_id=str(number), prompt=prompt, params=params)
            for number, prompt in enumerate(prompts(model))
        ]
    )
    engine.close()
    source.close()
    found: list[Answer] = [[] for _ in range(NUM_PROMPTS)]
    for _, delta in run.answers:
        found[int(delta.request_id)] += zip(delta.token_ids, delta.logprobs or (), strict=True)
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_greedy_ids_are_equal_across_frameworks(default_model: Path) -> None:
    """`-s` shows how many tokens were compared, and how long each framework took."""
    expected = answers(default_model, FRAMEWORKS[0])
    for name in FRAMEWORKS[1:]:
        began = time.monotonic()
        found = answers(default_model, name)
        seconds = time.monotonic() - began
        num_equal = [
            num_equal_before_a_tie(ours, theirs, f"{name}, prompt {number}")
            for number, (ours, theirs) in enumerate(zip(expected, found, strict=True))
        ]
        print(
            f"{name}: {sum(num_equal)} tokens equal to {FRAMEWORKS[0]}'s, none different; "
            f"{num_equal.count(NUM_NEW)} of {NUM_PROMPTS} answers to their end, "
            f"the others to a tie; {seconds:.0f} s with loading and compiling"
        )
        assert sum(num_equal) > 0.9 * NUM_PROMPTS * NUM_NEW


def num_equal_before_a_tie(ours: Answer, theirs: Answer, where: str) -> int:
    for position, ((token, scores), (other, _)) in enumerate(zip(ours, theirs, strict=True)):
        best, second = scores.top_logprobs
        if best - second < TIE:
            return position  # either may follow, and what comes after depends on it
        assert token == other, f"{where}, position {position}"
    return len(ours)
