"""The CUDA runner's logic, with interpreted kernels and plain calls instead of CUDA graphs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.adapters.reading import open_adapter
from engine.runtime.model_runner import ModelRunner
from engine.torch.execution import step_sizes
from engine.torch.execution.build import build_runner
from engine.torch.execution.cuda_runner import CudaRunner
from engine.torch.execution.device_sampler import Kind
from engine.torch.execution.runner import TorchRunner
from engine.torch.kernels import skinny
from engine.torch.models import base, blocks
from engine.torch.models.loading import build_model
from engine.weights.model import open_model
from tests.kernels.stand_ins import config, stand_in
from tests.parity import tiny_models
from tests.parity.runner_driver import RunnerDriver, Track, sampling_inputs
from tests.support.files.lora_files import peft_folder

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there the runner itself can be tested"
)
CPU = torch.device("cpu")
LENGTHS = (9, 3, 1)


@pytest.fixture(autouse=True)
def no_cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("slow") is None:
        # A single row has products of its own, which take ten seconds a step.
        for module in (base, blocks, skinny):
            monkeypatch.setattr(module, "is_few", lambda x: False)
        # Two layers: one has the cache of another beside its own.
        monkeypatch.setattr(tiny_models, "NUM_LAYERS", 2)
        monkeypatch.setitem(tiny_models.COMMON, "num_hidden_layers", 2)
    stand_in(monkeypatch)


def runners(name: str, folder: Path, num_window_blocks: int = 0) -> tuple[CudaRunner, ModelRunner]:
    _, path = tiny_models.save(name, folder)
    source = open_model(path)
    model = build_model(source.config, source.weights, tiny_models.MAX_POSITION, CPU, torch.float32)
    ours = CudaRunner(model, config("triton", num_window_blocks), CPU, torch.float32)
    ours._capturer.runner = ours  # type: ignore[attr-defined]
    return ours, build_runner(source, config("reference"))


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "llama",
        pytest.param("granite", marks=pytest.mark.slow),
        pytest.param("olmo2", marks=pytest.mark.slow),
        pytest.param("mistral-window", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.slow),
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("cohere2", marks=pytest.mark.slow),
        pytest.param("qwen3_moe-dense", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        "lfm2",
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
    ],
)
def test_generation_equals_the_reference(name: str, tmp_path: Path) -> None:
    generated = []
    for runner in runners(name, tmp_path):
        driver = RunnerDriver(runner)
        texts = [tiny_models.text(length, seed) for seed, length in enumerate(LENGTHS)]
        generated.append(driver.generate([driver.add(text) for text in texts], 2, chunk=5))
    assert generated[0] == generated[1]


@pytest.mark.parametrize(
    "name", ["qwen2-window", pytest.param("mistral-window", marks=pytest.mark.slow)]
)
def test_windowed_layers_have_a_cache_of_their_own(name: str, tmp_path: Path) -> None:
    """The pool is too small for a whole context. Free blocks are NaN. The reference keeps all
    blocks and masks.
    """
    ours, reference = runners(name, tmp_path, num_window_blocks=9)
    driver, plain = RunnerDriver(ours), RunnerDriver(reference)
    texts = [tiny_models.text(length, seed) for seed, length in enumerate((17, 2))]
    tracks = [driver.add(text) for text in texts]
    expected = plain.generate([plain.add(text) for text in texts], 2, chunk=9)
    while any(len(track.tokens) - track.num_prompt < 2 for track in tracks):
        driver.step([(t, min(9, len(t.tokens) - t.num_computed)) for t in tracks])
        windowed = ours._cache.caches[1].layers[0]
        windowed[[0, *driver.free_window_blocks]] = float("nan")
    assert [track.tokens[track.num_prompt :][:2] for track in tracks] == expected
    assert tracks[0].window_blocks.count(0) >= 1


def test_a_float8_kv_cache_gives_the_reference_tokens(tmp_path: Path) -> None:
    """Prefill in chunks, and decode."""
    _, path = tiny_models.save("llama", tmp_path)
    source = open_model(path)
    model = build_model(source.config, source.weights, tiny_models.MAX_POSITION, CPU, torch.float32)
    generated = []
    for kind, attention in ((CudaRunner, "triton"), (TorchRunner, "reference")):
        runner = kind(model, replace(config(attention), kv_dtype="fp8"), CPU, torch.float32)
        if isinstance(runner, CudaRunner):
            runner._capturer.runner = runner  # type: ignore[attr-defined]
        driver = RunnerDriver(runner)
        texts = [tiny_models.text(length, seed) for seed, length in enumerate((7, 2))]
        generated.append(driver.generate([driver.add(text) for text in texts], 2, chunk=5))
        assert runner._cache.layers[0].dtype == torch.float8_e4m3fn
    assert generated[0] == generated[1]


def test_a_step_with_an_image_runs_without_a_graph(tmp_path: Path) -> None:
    """Its tokens attend to each other both ways. The step after it has a graph again."""
    embeds = np.random.default_rng(0).normal(0, 1, (3, 48)).astype(np.float32)
    drawn = []
    for runner in runners("llama", tmp_path):
        driver = RunnerDriver(runner)
        track = driver.add(tiny_models.text(9, 0))
        inputs = driver.inputs([(track, 9)])
        ends = inputs.positions + 1
        ends[2:5] = 5
        places = np.array([2, 3, 4], np.int32)
        inputs = replace(inputs, embeds=embeds, embed_rows=places, visible_end=ends)
        sampling = sampling_inputs([0], [track.slot], [9])
        tokens = runner.sample(runner.forward(inputs), sampling).wait().tokens.tolist()
        track.num_computed = 9
        track.tokens += tokens
        driver.step([(track, 1)])
        drawn.append(track.tokens[9:])
    assert drawn[0] == drawn[1]


def test_a_sampled_token_still_in_flight_is_read_on_the_device(tmp_path: Path) -> None:
    runner, oracle = runners("llama", tmp_path)
    plain = RunnerDriver(oracle)
    expected = plain.generate([plain.add(tiny_models.text(5, 0))], 3)
    driver = RunnerDriver(runner)
    track = driver.add(tiny_models.text(5, 0))
    found = []
    for count in (5, 1, 1):
        handle = runner.forward(driver.inputs([(track, count)]))
        sampling = sampling_inputs([0], [track.slot], [len(track.tokens)])
        found.append(runner.sample(handle, sampling).wait().tokens.tolist()[0])
        track.num_computed += count
        track.tokens.append(0)
        track.in_flight = True
    assert [found] == expected


def asked_of_step(number: int, tracks: list[Track]) -> dict[str, object]:
    """One row penalized, one masked, one drawn; the fourth is plain. What they ask for changes."""
    penalized = tracks[0]
    mask = np.full((4, -(-tiny_models.VOCAB // 32)), 2**32 - 1, np.uint32)
    mask[1] = 0x2492 << number
    asked: dict[str, object] = {
        "temperature": [0.0, 0.0, 0.9, 0.0],
        "top_k": [0, 0, 3, 0],
        "repetition": [1.5, 1.0, 1.0, 1.0],
        "frequency": [0.7, 0.0, 0.0, 0.0],
        "bias_rows": [3, 2, 3][number:],
        "bias_ids": [5, 6, 7][number:],
        "bias_values": [2.0, -1.0, 3.0][number:],
        "seed": [1, 2, 3, 4],
        "mask": mask,
    }
    if number == 0:
        asked |= {
            "history_slots": [penalized.slot],
            "history_start": [0, len(penalized.tokens)],
            "history_tokens": penalized.tokens,
            "history_num_prompt": [penalized.num_prompt],
        }
    if number == 2:
        del asked["mask"]
    return asked


@pytest.mark.slow  # interpreted; the quick tests draw once by the same code
def test_sampling_cuda_graphs_draw_the_samplers_tokens(tmp_path: Path) -> None:
    """The last step has a graph of more rows than it needs: one of them belongs to nobody."""
    sampled = []
    for runner in runners("llama", tmp_path):
        driver = RunnerDriver(runner)
        tracks = [driver.add(tiny_models.text(3, seed)) for seed in range(4)]
        fifth = driver.add(tiny_models.text(2, 4))
        driver.step([(track, 3) for track in tracks])
        for number in range(3):
            asked = asked_of_step(number, tracks)
            driver.step([(track, 1) for track in tracks], **asked)
        driver.step([(fifth, 2)])
        driver.step([(track, 1) for track in (*tracks, fifth)], temperature=[0.0] * 4 + [1.0])
        sampled.append([track.tokens for track in (*tracks, fifth)])
        if isinstance(runner, CudaRunner):
            kinds = [kind for step in runner._steps.values() for kind in step.sample_graphs]
            assert Kind(adjusts=True, masks=True, samples=True) in kinds
    assert sampled[0] == sampled[1]


def test_a_token_from_the_host_replaces_the_devices_own_only_if_the_host_sampled_it(
    tmp_path: Path,
) -> None:
    """By a graph, although all rows are greedy."""
    runner, _ = runners("llama", tmp_path)
    driver = RunnerDriver(runner)
    tracks = [driver.add(tiny_models.text(3, seed)) for seed in range(3)]
    runner._last_token.fill_(-5)
    handle = runner.forward(driver.inputs([(track, 3) for track in tracks]))
    logits = runner.logits(handle, np.array([1, 2], np.int32))
    sampling = sampling_inputs(range(3), range(3), [3] * 3, forced=[8, -1, 9], host_rows=[2])
    tokens = runner.sample(handle, sampling).wait().tokens.tolist()
    assert tokens == [8, logits[0].argmax(), 9] and logits.shape == (2, runner.spec.vocab_size)
    assert runner._last_token[:3].tolist() == [-5, *tokens[1:]]


def test_logprobs_and_hidden_states_of_the_cuda_runner_equal_the_reference(tmp_path: Path) -> None:
    outputs = []
    for runner in runners("llama", tmp_path):
        driver = RunnerDriver(runner)
        tracks = [driver.add(tiny_models.text(length, length)) for length in (7, 3)]
        outputs.append(
            driver.step(
                [(track, len(track.tokens)) for track in tracks],
                temperature=[0.0, 0.7],
                num_logprobs=[2, -1],
                hidden_rows=[1],
            )
        )
    ours, reference = outputs
    assert ours.tokens.tolist() == reference.tokens.tolist()
    np.testing.assert_allclose(ours.logprobs, reference.logprobs, atol=1e-4)
    np.testing.assert_allclose(ours.hidden, reference.hidden, atol=1e-4)


def test_a_nonfinite_row_is_reported_and_its_cache_erased(tmp_path: Path) -> None:
    runner, _ = runners("llama", tmp_path)
    driver = RunnerDriver(runner)
    good, bad = driver.add(tiny_models.text(5, 0)), driver.add(tiny_models.text(6, 1))
    embedded = runner._model.embed.weight
    spared = next(token for token in bad.tokens if token not in good.tokens)
    with torch.no_grad():
        embedded[spared] = float("nan")
    output = driver.step([(good, 5), (bad, 6)])
    assert output.finite.tolist() == [True, False]
    assert bool(torch.isfinite(runner._cache.caches[0].slots[:, 4:]).all())


def test_nan_after_the_last_attention_is_reported(tmp_path: Path) -> None:
    """There only the rows that logits are read of go on."""
    runner, _ = runners("llama", tmp_path)
    with torch.no_grad():
        runner._model.layers[-1].mlp.down.weight[3] = float("nan")
    driver = RunnerDriver(runner)
    track = driver.add(tiny_models.text(14, 0))
    assert driver.step([(track, 14)]).finite.tolist() == [False]


def test_cuda_graph_sizes_cover_every_batch_size() -> None:
    for most in (1, 3, 16, 200, 256, 300, 1024):
        sizes = step_sizes.row_sizes(most)
        assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == most
        assert all(step_sizes.at_least(sizes, rows) >= rows for rows in range(1, most + 1))
    assert step_sizes.at_least((1, 2), 3) is None


@pytest.mark.slow
def test_steps_with_adapters_equal_the_reference(tmp_path: Path) -> None:
    """Prefill and replayed decode steps, also after an adapter of a larger rank was added."""
    shapes = {
        "model.layers.0.self_attn.q_proj": (48, 48),
        "model.layers.0.mlp.up_proj": (80, 48),
        "model.layers.1.mlp.down_proj": (48, 80),
    }
    folders = [
        peft_folder(tmp_path / str(rank), shapes, rank=rank, std=0.3, seed=rank) for rank in (4, 20)
    ]
    found = []
    for runner in runners("llama", tmp_path):
        assert isinstance(runner, TorchRunner)
        adapters = [open_adapter(folder, runner._model.config) for folder in folders]
        runner.set_adapter(1, runner.pack_adapter(adapters[0]))
        driver = RunnerDriver(runner)
        tracks = [driver.add(tiny_models.text(length, length)) for length in LENGTHS]
        logits = []
        for count in (0, 1, 1, 1):
            if len(logits) == 2:
                runner.set_adapter(2, runner.pack_adapter(adapters[1]))
            work = [(track, count or len(track.tokens)) for track in tracks]
            places = [0, 1, 1] if len(logits) < 2 else [0, 1, 2]
            inputs = replace(driver.inputs(work), adapter_ids=np.array(places, np.int32))
            handle = runner.forward(inputs)
            logits.append(runner.logits(handle, np.arange(3, dtype=np.int32)))
            for track, (_, length) in zip(tracks, work, strict=True):
                track.num_computed += length
                track.tokens.append(5)
        found.append(np.stack(logits))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    assert np.abs(found[0][0, 1] - found[0][0, 2]).max() > 0.1
