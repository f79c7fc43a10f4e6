"""Perplexity of the default model in all numerics, against recorded figures and llama.cpp's.

The text is the first 20,480 tokens of `tests/data/alice.txt`. llama.cpp's figure was printed by

    llama-perplexity -m SmolLM2-135M-Instruct.Q4_1.gguf -f tests/data/alice.txt -c 512 --chunks 40

at version 0.5.0-dev (commit 0c1e570) with AMX. `python -m benchmarks.accuracy.run` repeats the
comparison and also compares the generated text.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.accuracy.ours import (
    ALL_NUMERICS,
    DEFAULT,
    FAST,
    FLOAT,
    GENERATED,
    INT8_KV,
    INT8_KV_GENERATED,
    Numerics,
    perplexity,
    running,
)
from benchmarks.accuracy.run import Figures, Words, judge
from benchmarks.accuracy.text import MIN_WORDS, WINDOW, WINDOWS, passages, read_text, windows
from engine.core.text.tokenizer import Tokenizer
from engine.native.execution.build import kernels
from engine.weights.model import ModelSource, open_model

OF_LLAMA_CPP = 19.2726
RECORDED = {
    DEFAULT: 19.2403,
    GENERATED: 19.2303,
    FAST: 19.3028,  # on ARM, keys and values in 8 bits
    FLOAT: 19.2175,
    INT8_KV: 19.2512,
    INT8_KV_GENERATED: 19.2678,
}


@pytest.fixture(scope="module")
def source(default_model: Path) -> Iterator[ModelSource]:
    source = open_model(default_model)
    yield source
    source.close()


@pytest.mark.slow
@pytest.mark.parametrize("isa", kernels().instruction_sets()[1:])  # the first one is portable
@pytest.mark.parametrize("numerics", ALL_NUMERICS, ids=lambda each: each.label)
def test_perplexity_equals_the_recorded_value_and_llama_cpps(
    source: ModelSource, numerics: Numerics, isa: str
) -> None:
    alike = DEFAULT if numerics is FAST and not kernels().has_per_channel(isa) else numerics
    token_ids = Tokenizer.from_gguf(source.metadata).encode(read_text())
    with running(source, numerics, None, isa) as runner:
        found = perplexity(runner, numerics, windows(token_ids))
    assert found == pytest.approx(RECORDED[alike], rel=0.002)
    assert found == pytest.approx(OF_LLAMA_CPP, rel=0.005)


def test_last_word_passages_end_before_a_word_of_their_context() -> None:
    text = read_text()
    found = passages(text)
    assert len(found) == 1176
    for passage in found:
        assert f"{passage.context} {passage.word}" in text
        assert passage.word.lower() in passage.context.lower()
        assert len(passage.context.split()) > MIN_WORDS // 2
    assert all(len(window) == WINDOW for window in windows(list(range(WINDOW * WINDOWS))))


def test_accuracy_verdict_tolerates_half_a_percent_either_way() -> None:
    def figures(perplexity: float, found: int) -> Figures:
        answers = [[1]] * 1000
        return Figures("it", perplexity, Words([[1]] * found + [[2]] * (1000 - found), answers))

    theirs = figures(20.0, 500)
    assert judge([figures(20.09, 504), figures(19.91, 496), Figures("it", 20.0)], theirs) == []
    assert judge([figures(20.2, 495)], theirs) == [
        "it: perplexity is off by +1.000 %",
        "it: last words are off by -0.50 %, noise 0.22 %",
    ]
    assert len(judge([figures(float("nan"), 500), figures(19.8, 506)], theirs)) == 3
