"""The runner on a CUDA device equals the runner on a CPU, and waits only in `wait`."""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import invariant
from benchmarks.gpu.workloads import SHAPES
from engine.runtime.model_runner import ModelRunner, RunnerConfig
from engine.runtime.samplers.host_sampler import row_keys, token_words
from engine.torch.execution.build import build_runner
from engine.torch.kernels.sampling import gumbel
from engine.weights.model import ModelSource, open_model
from tests.parity import tiny_models
from tests.parity.runner_driver import RunnerDriver, sampling_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NAMES = (
    "gpt2",
    "llama",
    "mistral-window",
    "qwen3",
    "granite",
    "olmo2",
    "smollm3",
    "gemma2",
    "gemma3",
    "cohere2",
    "stablelm",
    "nemotron",
    "gpt_neox",
    "mpt",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe-dense",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "lfm2",
    "granitemoehybrid",
    "nemotron_h",
    "qwen3_next",
)
# The models that `--numerics invariant` covers: with windows, sinks, norms, biases and experts.
INVARIANT = ("gpt2", "llama", "mistral-window", "qwen3", "granite", "olmo2", "gemma3", "gpt_oss")


def runner_on(
    source: ModelSource, device: str, attention: str = "auto", numerics: str = "auto"
) -> ModelRunner:
    config = RunnerConfig(
        device=device,
        dtype="float32",
        block_size=4,
        num_blocks=128,
        max_slots=16,
        max_seq_len=tiny_models.MAX_POSITION,
        num_threads=None,
        attention=attention,
        numerics=numerics,
    )
    return build_runner(source, config)


@pytest.mark.parametrize("attention", ["reference", "sdpa", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_cuda_generation_equals_the_cpu(name: str, attention: str, tmp_path: Path) -> None:
    _, path = tiny_models.save(name, tmp_path)
    source = open_model(path)
    texts = [tiny_models.text(length, seed) for seed, length in enumerate((40, 5, 17, 1))]
    generated = []
    for device in ("cpu", "cuda"):
        there = "reference" if device == "cpu" else attention
        driver = RunnerDriver(runner_on(source, device, there))
        generated.append(driver.generate([driver.add(text) for text in texts], 12, chunk=8))
    assert generated[0] == generated[1]


@pytest.mark.parametrize("name", INVARIANT)
def test_invariant_cuda_generation_equals_the_cpu(name: str, tmp_path: Path) -> None:
    _, path = tiny_models.save(name, tmp_path)
    source = open_model(path)
    texts = [tiny_models.text(length, seed) for seed, length in enumerate((40, 5, 17, 1))]
    generated = []
    for device, attention, numerics in (
        ("cpu", "reference", "auto"),
        ("cuda", "auto", "invariant"),
    ):
        driver = RunnerDriver(runner_on(source, device, attention, numerics))
        generated.append(driver.generate([driver.add(text) for text in texts], 12, chunk=8))
    assert generated[0] == generated[1]


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8", "kv_dtype": "fp8"}], ids=str)
def test_256_invariant_requests_have_the_same_tokens_alone_and_batched(
    options: dict[str, str],
) -> None:
    """256 requests in bfloat16: alone, all together, and in another order."""
    with invariant.engine("llama-1b", "cuda", "invariant", options) as bench:
        counts = invariant.equal_counts(bench, SHAPES["llama-1b"])
    assert counts == (256, 256, 256)


def test_gumbel_noise_on_the_gpu_equals_the_cpu() -> None:
    keys = torch.from_numpy(row_keys(*(torch.arange(33).numpy() for _ in range(3))))
    words = torch.from_numpy(token_words(50_001))
    on_device = gumbel(keys.cuda(), words.cuda()).cpu()
    torch.testing.assert_close(on_device, gumbel(keys, words), atol=1e-5, rtol=1e-5)


def test_two_steps_are_launched_before_the_first_is_awaited(tmp_path: Path) -> None:
    """Depth 1: step 2 feeds on step 1's tokens on the device; nothing synchronises in between."""
    _, path = tiny_models.save("llama", tmp_path)
    source = open_model(path)
    runner, plain = runner_on(source, "cuda"), runner_on(source, "cpu")
    assert runner.spec.depth == 1
    driver, oracle = RunnerDriver(runner), RunnerDriver(plain)
    texts = [tiny_models.text(9, seed) for seed in range(3)]
    expected = oracle.generate([oracle.add(text) for text in texts], 2)
    tracks = [driver.add(text) for text in texts]
    options = {
        "temperature": [0.0, 0.0, 1e-4],
        "top_p": [1.0, 1.0, 0.9],
        "top_k": [0, 0, 5],
        "presence": [0.0, 0.0, 1e-6],
        "num_logprobs": [-1, 2, 0],
        "bias_rows": [1],
        "bias_ids": [4],
        "bias_values": [float("-inf")],
    }
    pending = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for count in (9, 1):
            handle = runner.forward(driver.inputs([(track, count) for track in tracks]))
            ends = [len(track.tokens) for track in tracks]
            pending.append(
                runner.sample(handle, sampling_inputs(range(3), range(3), ends, **options))
            )
            for track in tracks:
                track.num_computed += count
                track.tokens.append(0)
                track.in_flight = True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    steps = [step.wait().tokens.tolist() for step in pending]
    assert [list(tokens) for tokens in zip(*steps, strict=True)] == expected
