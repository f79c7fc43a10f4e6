"""What `build_runner` refuses, what a runner says of itself, and that only `wait` waits."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import engine.torch as framework
from engine.architectures.base import (
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    RopeConfig,
)
from engine.architectures.hybrids.states import StateConfig
from engine.core.errors import ConfigError, ModelFormatError
from engine.runtime.model_runner import RunnerConfig
from engine.torch.execution.build import build_runner
from engine.torch.invariance import check_invariant
from tests.parity.runner_driver import RunnerDriver

MODEL = ModelConfig(
    family="llama",
    vocab_size=40,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
    max_position=64,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope=RopeConfig(theta=10000.0, dim=4),
)
RUNNER = RunnerConfig(
    device="cpu",
    dtype="float32",
    block_size=4,
    num_blocks=32,
    max_slots=4,
    max_seq_len=64,
    num_threads=1,
)


class Array:
    """A weight that is already an array."""

    def __init__(self, *shape: int) -> None:
        seed = sum(shape)
        self.values = np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32)

    def numpy(self) -> np.ndarray:
        return self.values


def weights(**changes: Array | None) -> dict[str, Array]:
    found = {"embed.weight": Array(40, 16), "norm.weight": Array(16)}
    for layer in range(MODEL.num_layers):
        shapes = {
            "attn_norm": (16,),
            "mlp_norm": (16,),
            "attn.q": (16, 16),
            "attn.k": (8, 16),
            "attn.v": (8, 16),
            "attn.o": (16, 16),
            "mlp.gate": (24, 16),
            "mlp.up": (24, 16),
            "mlp.down": (16, 24),
        }
        found |= {f"layers.{layer}.{n}.weight": Array(*shape) for n, shape in shapes.items()}
    found |= changes
    return {name: weight for name, weight in found.items() if weight is not None}


def source(config: ModelConfig = MODEL, **changes: Array | None) -> SimpleNamespace:
    return SimpleNamespace(config=config, weights=weights(**changes))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": "int3"}, "float32"),
        ({"device": "abacus"}, "cuda"),
        ({"device": "meta"}, "cuda"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"attention": "magic"}, "sdpa"),
        ({"quantization": "fp8"}, "needs a GPU"),
        ({"kv_dtype": "fp8"}, "needs a GPU"),
        ({"kv_dtype": "int8"}, "native"),
        ({"numerics": "invariant"}, "native"),
    ],
)
def test_unusable_settings_are_refused_by_name(changes, word):
    with pytest.raises(ConfigError, match=word):
        build_runner(source(), replace(RUNNER, **changes))


@pytest.mark.parametrize(
    ("model", "runner", "word"),
    [
        ({}, {"attention": "sdpa"}, "sdpa"),
        ({}, {"quantization": "int8"}, "scale per group"),
        ({"latent": LatentConfig(8, None, 4, 4, 8)}, {}, "latent attention"),
        ({"state": StateConfig(3)}, {}, "keep a state"),
        ({"experts": ExpertsConfig(4, 2, 8, correction=True)}, {}, "correction"),
        ({"qk_norm": "head", "rope": None}, {}, "norms per head"),
    ],
)
def test_settings_without_a_fixed_summation_order_are_refused_for_invariant_numerics(
    model, runner, word
) -> None:
    with pytest.raises(ConfigError, match=word):
        given = source(replace(MODEL, **model))
        check_invariant(given, replace(RUNNER, **runner), torch.device("cuda"))
    check_invariant(source(), RUNNER, torch.device("cuda"))


def test_invariant_numerics_are_refused_on_amd_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    with pytest.raises(ConfigError, match="AMD"):
        check_invariant(source(), RUNNER, torch.device("cuda"))


def test_learned_positions_bound_the_context_length():
    with pytest.raises(ConfigError, match="learned positions"):
        build_runner(source(replace(MODEL, rope=None)), replace(RUNNER, max_seq_len=65))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layers.1.attn.k.weight": None}, "layers.1.attn.k.weight"),
        ({"layers.1.attn.k.bias": Array(8)}, "layers.1.attn.k.bias"),
        ({"layers.0.mlp.up.weight": Array(23, 16)}, r"layers\.0\.mlp\.up\.weight.*\(24, 16\)"),
    ],
)
def test_a_checkpoint_with_a_wrong_shape_names_the_weight(changes, word):
    with pytest.raises(ModelFormatError, match=word):
        build_runner(source(**changes), RUNNER)


def test_rope_factors_divide_frequencies():
    """Factors of one change nothing; a missing or misshapen vector is refused."""
    config = replace(MODEL, rope=replace(MODEL.rope, kind="factors"))
    ones, fours = Array(2), Array(2)
    ones.values[:], fours.values[:] = 1.0, 4.0

    def logits(model: ModelConfig, **changes: Array) -> torch.Tensor:
        driver = RunnerDriver(build_runner(source(model, **changes), RUNNER))
        return driver.runner.forward(driver.inputs([(driver.add(range(9)), 9)])).logits

    plain = logits(MODEL)
    torch.testing.assert_close(logits(config, **{"rope.factors": ones}), plain)
    linear = replace(MODEL, rope=replace(MODEL.rope, kind="linear", factor=4.0))
    divided = logits(config, **{"rope.factors": fours})
    torch.testing.assert_close(divided, logits(linear))
    assert not torch.allclose(divided, plain)
    for wrong in ({}, {"rope.factors": Array(3)}):
        with pytest.raises(ModelFormatError, match=r"rope\.factors"):
            build_runner(source(config, **wrong), RUNNER)


def test_a_step_may_sample_no_rows_and_penalties_count_the_token_in_flight():
    runner = build_runner(source(), RUNNER)
    assert runner.spec.depth == 0
    driver = RunnerDriver(runner)
    track = driver.add(range(10))
    output = driver.step([(track, 6)])
    assert output.tokens.shape == (0,)
    assert output.finite.tolist() == [True]
    # A presence penalty this high never lets a token come twice; the history is given once.
    history = {
        "history_slots": [track.slot],
        "history_start": [0, 10],
        "history_tokens": track.tokens,
        "history_num_prompt": [10],
    }
    driver.step([(track, 4)], presence=[1e4], **history)
    for _ in range(20):
        track.in_flight = True
        driver.step([(track, 1)], presence=[1e4])
    drawn = track.tokens[10:]
    assert len(set(drawn)) == len(drawn) == 21


def test_only_wait_synchronizes_with_the_device():
    """`.item()` and its kin stall the queue; `numpy()` on a result is `wait`'s alone. An encoder
    has no queue: each batch or image is done when its vectors are there. A profile waits on
    purpose.
    """
    folder = Path(framework.__file__).parent
    syncs = re.compile(r"\.(item|tolist|cpu|nonzero|synchronize)\(")
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(folder.rglob("*.py"))
        if path.name not in ("encoder.py", "profiling.py", "vision.py")
        for line in path.read_text().splitlines()
        if syncs.search(line)
    ]
    # Blocks for a cache tier, in the thread that writes them; the profiler; rows that the host
    # samples; two in a `wait`; two before the first request; and the thread that loads an adapter.
    # `nonzero` is in the reference of a kernel, which runs on a CPU.
    assert found == [
        "adapter_stacks.py: stream.synchronize()",
        "blocks.py: done.synchronize()",
        "build.py: torch.cuda.synchronize(self._device)",
        "sampling_runner.py: self.done.synchronize()",
        "sampling_runner.py: torch.cuda.current_stream(self._device).synchronize()",
        "staging.py: self.pinned.copied.synchronize()",
        "lora.py: own = (places == place).nonzero()[:, 0]",
        "upload.py: fetched.synchronize()",
        "warming.py: torch.cuda.synchronize(device)",
    ]
