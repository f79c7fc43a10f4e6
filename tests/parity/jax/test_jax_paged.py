"""JAX over its paged cache: attention kernels against a plain sequence, generation against
Transformers, and tensor parallelism over four devices.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from engine.core.errors import ConfigError
from engine.jax.execution.buckets import attention_items, packed_step
from engine.jax.execution.build import build_runner
from engine.jax.execution.programs import forward
from engine.jax.kernels.attention import ATTENTION
from engine.jax.kernels.work import AttentionShape, PerHead, Work
from engine.runners.scoring import Scoring
from engine.runtime.model_runner import RunnerConfig
from engine.weights.model import open_model
from tests.parity import jax_generation, tiny_models
from tests.parity.plain_attention import plain_attention
from tests.parity.runner_driver import RunnerDriver

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
TABLE_BLOCKS = 64
SLOPES = 2.0 ** -np.arange(1, HEADS + 1, dtype=np.float32)
SINKS = np.linspace(-1, 2, HEADS, dtype=np.float32)
LENGTHS = (40, 5, 17, 1, 33)
NUM_NEW = 12
# Transformers rotates by the length of each sequence, the engine by the longest that it serves.
BY_LENGTH = ("llama-dynamic", "phi3-long")
CONFIG = RunnerConfig(
    device="cpu",
    dtype="float32",
    block_size=4,
    num_blocks=128,
    max_slots=8,
    max_seq_len=64,
    num_threads=None,
)


def paged(lengths, counts, tile, block_size, scoring, per_head):
    """Queries at the ends of sequences in shuffled blocks, the work, and what must come out."""
    rng = np.random.default_rng(0)
    used = [-(-length // block_size) for length in lengths]
    free = rng.permutation(np.arange(1, sum(used) + 1))
    tables = np.zeros((len(lengths), TABLE_BLOCKS), np.int32)
    # What nobody has written yet must not be seen, not even as NaN under a mask.
    cache = np.full(((sum(used) + 1) * block_size, 2, KV_HEADS, HEAD_DIM), np.nan, np.float32)
    queries, positions, expected = [], [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, : used[row]], free = free[: used[row]], free[used[row] :]
        heads = (HEADS, KV_HEADS, KV_HEADS)
        q, k, v = (rng.standard_normal((length, n, HEAD_DIM), np.float32) for n in heads)
        at = np.arange(length)
        slots = tables[row, at // block_size] * block_size + at % block_size
        cache[slots] = np.stack((k, v), axis=1)
        queries.append(q[-count:])
        positions.append(at[-count:])
        expected.append(plain_attention(q, k, v, scoring, *per_head)[-count:])
        if scoring.window is not None:  # the blocks that the window has left are freed
            tables[row, : max(0, length - count - scoring.window + 1) // block_size] = 0
    start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    items = attention_items(start, np.array(counts, np.int32), tile)
    num_singles = np.int32((items[1] == 1).sum())
    unused = np.zeros(3, np.int32)
    work = Work(
        np.concatenate(positions).astype(np.int32),
        tables,
        *(np.concatenate((array, unused)) for array in items),
        num_singles,
        np.int32(len(items[0])),
    )
    return np.concatenate(queries), cache, work, np.concatenate(expected)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(
    ("counts", "tile", "block_size", "scoring", "per_head"),
    [
        ((1, 5, 9, 1, 33), 8, 4, Scoring(0.25), PerHead(slopes=SLOPES)),
        ((1, 5, 9, 1, 33), 8, 4, Scoring(0.25, window=11, softcap=0.7), PerHead(sinks=SINKS)),
        ((1, 1, 1, 1, 1), 1, 16, Scoring(0.25), PerHead()),
    ],
)
def test_attention_kernels_equal_plain_attention(
    name, counts, tile, block_size, scoring, per_head
) -> None:
    """Later chunks, whole prompts and single queries in one step, with contexts of two chunks."""
    q, cache, work, expected = paged(
        (40, 5, 17, 1, 200), counts, tile, block_size, scoring, per_head
    )
    shape = AttentionShape(tile, block_size, scoring, HEAD_DIM)
    found = jax.jit(partial(ATTENTION[name], shape=shape))(q, cache, work, per_head=per_head)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def expected_ids(model) -> list[list[int]]:
    found = []
    for prompt in prompts():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def prompts() -> list[list[int]]:
    return [tiny_models.text(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    "name",
    tiny_models.quick_first(("gpt2", "gpt_oss"), without=(*BY_LENGTH, *tiny_models.HYBRIDS)),
)
def test_mixed_batches_generate_the_same_ids_as_transformers(name: str, tmp_path: Path) -> None:
    model, path = tiny_models.save(name, tmp_path)
    assert jax_generation.generate(path, "cpu", prompts(), NUM_NEW) == expected_ids(model)


def test_no_step_copies_the_kv_cache(tmp_path: Path) -> None:
    """A lone row, several, and a prompt: each program writes a donated cache where it lies."""
    _, path = tiny_models.save("gpt2", tmp_path)
    runner = build_runner(open_model(path), replace(CONFIG, block_size=16))
    driver = RunnerDriver(runner)
    for counts in ((1,), (1, 1, 1), (5, 1)):
        inputs = driver.inputs([(driver.add(range(count)), count) for count in counts])
        bucket = runner._buckets.of(inputs)
        program = forward.trace(
            runner._program,
            bucket,
            runner._params,
            runner._caches,
            runner._last_token,
            packed_step(inputs, bucket),
        )
        shape = ",".join(map(str, runner._caches[0].shape))
        assert f"f32[{shape}]" in (text := program.lower().compile().as_text())
        assert not re.search(rf"= f32\[{shape}\]\S* copy\(", text), counts


@pytest.mark.integration
def test_tensor_parallelism_on_four_devices_generates_the_same_ids_as_transformers(
    tmp_path: Path,
) -> None:
    """In a process of its own: how many devices a CPU pretends to be is said before JAX begins."""
    model, path = tiny_models.save("llama-four-ways", tmp_path)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    command = [sys.executable, "-m", jax_generation.__name__, str(path), "cpu:0-3", str(NUM_NEW)]
    answer = subprocess.run(
        command,
        input=json.dumps(prompts()),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"XLA_FLAGS": flags},
        timeout=100,
    )
    assert json.loads(answer.stdout) == expected_ids(model)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": "int3"}, "float32"),
        ({"device": "abacus"}, "cuda"),
        ({"device": "cpu:7"}, "cpu:7"),
        ({"attention": "magic"}, "pallas"),
        ({"num_threads": 2}, "taskset"),
        ({"kv_dtype": "int8"}, "native"),
        ({"numerics": "invariant"}, "native"),
        ({"quantization": "fp8"}, "torch"),
        ({"max_seq_len": tiny_models.MAX_POSITION + 1}, "learned positions"),
    ],
)
def test_unusable_settings_are_refused_by_name(changes, word, tmp_path: Path) -> None:
    _, path = tiny_models.save("gpt2", tmp_path)
    with pytest.raises(ConfigError, match=word):
        build_runner(open_model(path), replace(CONFIG, **changes))
