"""The default model on every framework in float32: the same greedy ids, up to where the two best
tokens are as good as equal.
"""

from importlib import import_module
from pathlib import Path

import pytest

from engine.backends.custom.driver import DrivenEngine
from engine.backends.custom.options import EngineOptions
from engine.backends.custom.weights.model import open_model
from engine.core.interfaces.request import GenerateRequest, SamplingParams, TokenLogprobs

FRAMEWORKS = ("native", "torch", "jax", "tinygrad")
NUM_PROMPTS, NUM_NEW = 32, 64
# Two sums of the same numbers in another order differ by less.
TIE = 1e-3
TEXT = Path(__file__).parents[1] / "data" / "alice.txt"

Answer = list[tuple[int, TokenLogprobs]]


def prompts(model: Path) -> list[tuple[int, ...]]:
    text = import_module("engine.backends.custom.text").load_text(model)
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
def test_greedy_ids_are_equal_across_frameworks(default_model: Path) -> None:
    expected, *others = (answers(default_model, framework) for framework in FRAMEWORKS)
    num_compared = 0
    for name, found in zip(FRAMEWORKS[1:], others, strict=True):
        for number, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
            for position, ((token, scores), (other, _)) in enumerate(
                zip(ours, theirs, strict=True)
            ):
                best, second = scores.top_logprobs
                if best - second < TIE:
                    break  # either may follow, and what comes after depends on it
                assert token == other, f"{name}, prompt {number}, position {position}"
                num_compared += 1
    assert num_compared > 0.9 * NUM_PROMPTS * NUM_NEW * len(others)
