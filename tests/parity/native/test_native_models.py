"""The native runner with float activations against Transformers, and against itself: a sequence's
tokens and logits are bit-identical in any batch.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.errors import ConfigError
from engine.native.execution.build import build_runner
from engine.native.execution.runner import NativeRunner
from engine.runtime.model_runner import RunnerConfig
from engine.weights.model import ModelSource, open_model
from tests.parity import tiny_models
from tests.parity.runner_driver import RunnerDriver, Track

# Float sums in another order over three small layers.
TOLERANCE = 1e-4
LENGTHS = (tiny_models.TEXT_LENGTH, 5, 17, 1, 33)


def runner_for(source: ModelSource, dtype: str = "float32", **changes) -> NativeRunner:
    settings = {
        "device": "cpu",
        "dtype": dtype,
        "block_size": 16,
        "num_blocks": 128,
        "max_slots": 16,
        "max_seq_len": tiny_models.MAX_POSITION,
        "num_threads": 2,
        "num_checkpoints": 1,
    }
    return build_runner(source, RunnerConfig(**settings | changes))


# Families that differ in attention or in the order of a layer's parts.
FAMILIES = (
    *("gpt2", "llama", "mistral-window", "qwen2", "qwen3", "granite", "olmo2"),
    *("gemma2", "mpt", "cohere2", "qwen2_moe", "gpt_oss", "lfm2"),
    *("granitemoehybrid", "qwen3_next"),
)


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    _, path = tiny_models.save(request.param, tmp_path_factory.mktemp("tiny"))
    source = open_model(path)
    yield source
    source.close()


def last_logits(driver: RunnerDriver, work: list[tuple[Track, int]]) -> np.ndarray:
    runner = driver.runner
    logits = runner.logits(runner.forward(driver.inputs(work)))
    for track, count in work:
        track.num_computed += count
    return logits


@pytest.mark.parametrize("name", tiny_models.ALL)
def test_logits_equal_hugging_face(name: str, tmp_path: Path) -> None:
    theirs, path = tiny_models.save(name, tmp_path)
    tokens = tiny_models.text()
    source = open_model(path)
    driver = RunnerDriver(runner_for(source))
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    track = driver.add(tokens[:1])
    for position, token in enumerate(tokens):
        ours = last_logits(driver, [(track, 1)])[0]
        np.testing.assert_allclose(ours, expected[position], atol=TOLERANCE, rtol=0)
        track.tokens.append(tokens[position + 1] if position + 1 < len(tokens) else token)
    whole = driver.add(tokens)
    np.testing.assert_allclose(
        last_logits(driver, [(whole, len(tokens))])[0], expected[-1], atol=TOLERANCE, rtol=0
    )


def test_longrope_uses_the_short_factors_for_a_short_context(tmp_path: Path) -> None:
    theirs, path = tiny_models.save("phi3-long", tmp_path)
    tokens = tiny_models.text(32)  # as long as the context that the model was first trained with
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0, -1].numpy()
    for max_seq_len, agrees in ((len(tokens), True), (tiny_models.MAX_POSITION, False)):
        driver = RunnerDriver(runner_for(open_model(path), max_seq_len=max_seq_len))
        ours = last_logits(driver, [(driver.add(tokens), len(tokens))])[0]
        assert np.allclose(ours, expected, atol=TOLERANCE, rtol=0) == agrees


@pytest.mark.parametrize("chunk", [1, 3, 16, 29])
def test_chunked_prefill_is_bit_identical_to_whole_prefill(source: ModelSource, chunk: int) -> None:
    driver = RunnerDriver(runner_for(source))
    tokens = tiny_models.text()
    whole = driver.add(tokens)
    expected = last_logits(driver, [(whole, len(tokens))])
    track = driver.add(tokens)
    while track.num_computed + chunk < len(tokens):
        last_logits(driver, [(track, chunk)])
    logits = last_logits(driver, [(track, len(tokens) - track.num_computed)])
    np.testing.assert_array_equal(logits, expected)


def test_batched_logits_are_bit_identical_to_logits_computed_alone(source: ModelSource) -> None:
    """Prompts, later chunks and single tokens in one step, rows in no helpful order."""
    texts = [tiny_models.text(length, seed) for seed, length in enumerate(LENGTHS)]
    driver = RunnerDriver(runner_for(source))
    tracks = [driver.add(text) for text in texts]
    last_logits(driver, [(tracks[0], 39), (tracks[4], 20)])
    last_logits(driver, [(tracks[1], 4)])
    work = [(tracks[0], 1), (tracks[2], 17), (tracks[1], 1), (tracks[4], 13), (tracks[3], 1)]
    logits = last_logits(driver, work)
    for row, index in enumerate((0, 2, 1, 4, 3)):
        alone = RunnerDriver(runner_for(source))
        track = alone.add(texts[index])
        np.testing.assert_array_equal(logits[row], last_logits(alone, [(track, LENGTHS[index])])[0])


def test_shared_prefix_blocks_are_bit_identical_to_recomputed_ones(source: ModelSource) -> None:
    driver = RunnerDriver(runner_for(source))
    prefix = tiny_models.text()
    first = driver.add(prefix)
    first.save = 0
    driver.step([(first, 32)])
    first.save = -1
    driver.step([(first, len(prefix) - 32)])
    texts = [prefix[:32] + tiny_models.text(length, seed=7) for length in (9, 1)]
    tracks = [driver.add(text, prefix=first, shared=2) for text in texts]
    for track in tracks:
        track.load = 0
    logits = last_logits(driver, [(tracks[0], 9), (tracks[1], 1)])
    for row, text in zip(logits, texts, strict=True):
        cold = RunnerDriver(runner_for(source))
        track = cold.add(text)
        np.testing.assert_array_equal(row, last_logits(cold, [(track, len(text))])[0])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_an_int8_or_bfloat16_kv_cache_stays_near_the_exact_logits(
    source: ModelSource, kv_dtype: str
) -> None:
    exact, narrow = (RunnerDriver(runner_for(source, kv_dtype=each)) for each in ("auto", kv_dtype))
    tokens = tiny_models.text()
    expected, found = (
        last_logits(driver, [(driver.add(tokens), len(tokens))])[0] for driver in (exact, narrow)
    )
    assert not np.array_equal(found, expected)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < {"bfloat16": 0.03, "int8": 0.05}[kv_dtype]


@pytest.mark.parametrize("dtype", ["float32", "stored"])
def test_nan_in_one_row_affects_neither_its_batch_nor_the_next_owner_of_its_blocks(
    tmp_path: Path, dtype: str
) -> None:
    """Not its batch mate, and not who gets its block of the cache afterwards."""
    model = tiny_models.make("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = torch.nan  # not among the values that are sampled
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    source = open_model(tmp_path / "model")
    driver = RunnerDriver(runner_for(source, dtype))
    sound = [token for token in tiny_models.text(60) if token != 50]
    good, bad = driver.add(sound[:9]), driver.add([*sound[:4], 50, *sound[4:9]])
    output = driver.step([(good, 9), (bad, 10)])
    assert output.finite.tolist() == [True, False]
    heir = driver.add(sound[:20])
    heir.blocks = bad.blocks
    assert driver.step([(good, 1), (heir, 20)]).finite.all()
    alone = RunnerDriver(runner_for(source, dtype))
    tracks = [alone.add(sound[:9]), alone.add(sound[:20])]
    assert alone.generate(tracks[:1], 2) == [good.tokens[9:]]
    assert alone.generate(tracks[1:], 1) == [heir.tokens[20:]]


def test_nan_after_the_last_attention_is_reported(tmp_path: Path) -> None:
    """There only the rows that logits are read of go on."""
    model = tiny_models.make("llama")
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight[3] = torch.nan
    model.save_pretrained(tmp_path / "model")
    driver = RunnerDriver(runner_for(open_model(tmp_path / "model")))
    tokens = tiny_models.text(9)
    whole, begun = driver.add(tokens), driver.add(tokens)
    assert driver.step([(whole, 9), (begun, 5)]).finite.tolist() == [False, True]


def test_unsupported_runner_settings_are_refused_by_name(source: ModelSource) -> None:
    with pytest.raises(ConfigError, match="block_size 8 must be a multiple"):
        runner_for(source, block_size=8)
    if source.config.learned_positions:
        with pytest.raises(ConfigError, match="learned positions"):
            runner_for(source, max_seq_len=tiny_models.MAX_POSITION + 1)
