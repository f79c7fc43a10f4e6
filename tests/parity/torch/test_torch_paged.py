"""The torch runner over its paged cache against the whole-sequence forward, for any step cuts."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.runtime.model_runner import RunnerConfig
from engine.torch.execution.build import build_runner
from engine.torch.execution.runner import TorchRunner
from engine.torch.models.loading import build_model
from engine.weights.model import ModelSource, open_model
from tests.parity import tiny_models
from tests.parity.runner_driver import RunnerDriver, Track

NAMES = (
    "gpt2",
    "llama",
    "mistral-window",
    "qwen2",
    "qwen3",
    "granite",
    "olmo2",
    "gemma2",
    "cohere2",
    "mpt",
    "gpt_oss",
)
BLOCK_SIZE = 4
TOLERANCE = 1e-4
LENGTHS = (tiny_models.TEXT_LENGTH, 5, 17, 1, 33)


@pytest.fixture(scope="module", params=NAMES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    _, path = tiny_models.save(request.param, tmp_path_factory.mktemp("tiny"))
    source = open_model(path)
    yield source
    source.close()


def runner_for(source: ModelSource, attention: str = "auto", dtype: str = "float32") -> TorchRunner:
    config = RunnerConfig(
        device="cpu",
        dtype=dtype,
        block_size=BLOCK_SIZE,
        num_blocks=128,
        max_slots=16,
        max_seq_len=tiny_models.MAX_POSITION,
        num_threads=1,  # two threads crawl where other processes share the cores
        attention=attention,
    )
    runner = build_runner(source, config)
    assert isinstance(runner, TorchRunner)
    return runner


def expected_logits(source: ModelSource, tokens: list[int]) -> torch.Tensor:
    model = build_model(
        source.config,
        source.weights,
        tiny_models.MAX_POSITION,
        torch.device("cpu"),
        torch.float32,
    )
    with torch.no_grad():
        return model.forward_sequence(torch.tensor(tokens))


def last_logits(driver: RunnerDriver, work: list[tuple[Track, int]]) -> torch.Tensor:
    """Run one step and give the logits of its rows that reached their end, (R, V)."""
    logits = driver.runner.forward(driver.inputs(work)).logits
    for track, count in work:
        track.num_computed += count
    return logits


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunked_prefill_equals_whole_prefill(
    source: ModelSource, attention: str, chunk: int
) -> None:
    driver = RunnerDriver(runner_for(source, attention))
    tokens = tiny_models.text()
    track = driver.add(tokens)
    while track.num_computed + chunk < len(tokens):
        assert last_logits(driver, [(track, chunk)]) is None
    logits = last_logits(driver, [(track, len(tokens) - track.num_computed)])
    torch.testing.assert_close(logits, expected_logits(source, tokens)[-1:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_a_mixed_batch_equals_each_request_alone(source: ModelSource, attention: str) -> None:
    """One step of prompts, later chunks and single queries, rows in no helpful order."""
    driver = RunnerDriver(runner_for(source, attention))
    texts = [tiny_models.text(length, seed) for seed, length in enumerate(LENGTHS)]
    tracks = [driver.add(text) for text in texts]
    last_logits(driver, [(tracks[0], 39), (tracks[4], 20)])
    last_logits(driver, [(tracks[1], 4)])
    logits = last_logits(
        driver,
        [(tracks[0], 1), (tracks[2], 17), (tracks[1], 1), (tracks[4], 13), (tracks[3], 1)],
    )
    for row, index in enumerate((0, 2, 1, 4, 3)):
        expected = expected_logits(source, texts[index])[-1]
        torch.testing.assert_close(logits[row], expected, atol=TOLERANCE, rtol=0)


def test_batched_generation_equals_generation_alone(source: ModelSource) -> None:
    texts = [tiny_models.text(length, seed) for seed, length in enumerate(LENGTHS)]
    together = RunnerDriver(runner_for(source))
    batched = together.generate([together.add(text) for text in texts], 12, chunk=8)
    for text, tokens in zip(texts, batched, strict=True):
        alone = RunnerDriver(runner_for(source, "reference"))
        assert alone.generate([alone.add(text)], 12) == [tokens]


def test_shared_prefix_blocks_equal_recomputed_ones(source: ModelSource) -> None:
    """Blocks written by another sequence are read through the table, by a chunk or one query."""
    driver = RunnerDriver(runner_for(source))
    prefix, shared = tiny_models.text(), 5
    first = driver.add(prefix)
    driver.step([(first, len(prefix))])
    tails = [tiny_models.text(9, seed=7), tiny_models.text(1, seed=8)]
    texts = [prefix[: shared * BLOCK_SIZE] + tail for tail in tails]
    tracks = [driver.add(text, prefix=first, shared=shared) for text in texts]
    logits = last_logits(driver, [(tracks[0], 9), (tracks[1], 1)])
    for row, text in zip(logits, texts, strict=True):
        torch.testing.assert_close(row, expected_logits(source, text)[-1], atol=TOLERANCE, rtol=0)


def test_from_device_stands_for_the_slots_last_sampled_token(source: ModelSource) -> None:
    """FROM_DEVICE stands for the slot's last drawn token, whatever other rows did."""
    driver = RunnerDriver(runner_for(source))
    tracks = [driver.add(tiny_models.text(6, seed)) for seed in range(3)]
    driver.step([(track, 6) for track in tracks])
    known = [list(track.tokens) for track in tracks]
    for track in tracks:
        track.in_flight = True
        track.tokens[-1] = 0  # the driver forgets it
    logits = last_logits(driver, [(tracks[2], 1), (tracks[0], 1)])
    for row, index in zip(logits, (2, 0), strict=True):
        torch.testing.assert_close(
            row, expected_logits(source, known[index])[-1], atol=TOLERANCE, rtol=0
        )


def test_bfloat16_runner_stays_near_float32(source: ModelSource) -> None:
    """The packed-weight path: looser arithmetic, the same model."""
    driver = RunnerDriver(runner_for(source, dtype="bfloat16"))
    tokens = tiny_models.text()
    track = driver.add(tokens)
    last_logits(driver, [(track, 30)])
    logits = last_logits(driver, [(track, 10)])
    expected = expected_logits(source, tokens)[-1:]
    error = (logits - expected).norm() / expected.norm()
    assert error < 0.1


def test_a_row_with_nan_is_flagged_and_leaves_no_trace_in_the_cache(source: ModelSource) -> None:
    """Its neighbours are untouched, and the next owner of its blocks reads nothing of it."""
    runner = runner_for(source)
    driver = RunnerDriver(runner)
    texts = [tiny_models.text(9, seed) for seed in range(3)]
    poison = 2  # a token that no text holds
    with torch.no_grad():
        runner._model.embed.weight[poison] = float("nan")
    tracks = [driver.add(text) for text in texts]
    sick = driver.add([*texts[0][:5], poison, *texts[0][5:8]])
    output = driver.step([(tracks[0], 9), (sick, 9), (tracks[1], 4)])
    np.testing.assert_array_equal(output.finite, [True, False, True])
    heir = driver.add(texts[2][:6])
    heir.blocks = list(sick.blocks)
    last_logits(driver, [(heir, 6)])
    heir.tokens.append(texts[2][6])
    tracks[2].tokens = texts[2][:1]
    # Two single queries share one masked gather, which covers the rest of the inherited block.
    logits = last_logits(driver, [(heir, 1), (tracks[2], 1), (tracks[1], 5)])
    # A tied head knows the poisoned token too; every other logit must be what it was.
    sane = [token for token in range(tiny_models.VOCAB) if token != poison]
    for row, text in zip(logits, (texts[2][:7], texts[2][:1], texts[1]), strict=True):
        expected = expected_logits(source, text)[-1]
        torch.testing.assert_close(row[sane], expected[sane], atol=TOLERANCE, rtol=0)
