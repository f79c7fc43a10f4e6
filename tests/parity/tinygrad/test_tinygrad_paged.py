"""tinygrad over its paged cache: attention against a plain sequence, generation against
Transformers, and settings that it rejects.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from tinygrad import Tensor, Variable

from engine.core.errors import ConfigError
from engine.runners.scoring import Scoring
from engine.runtime.model_runner import RunnerConfig
from engine.tinygrad.execution import build as device
from engine.tinygrad.execution.build import build_runner
from engine.tinygrad.kernels.attention import (
    Pages,
    PerHead,
    Work,
    attend,
    write,
)
from engine.weights.model import open_model
from tests.parity import tiny_models
from tests.parity.plain_attention import plain_attention
from tests.parity.runner_driver import RunnerDriver

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
BLOCK_SIZE, TABLE_BLOCKS = 4, 32
NUM_NEW = 12
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "num_blocks": 128,
    "max_slots": 8,
    "max_seq_len": 128,
    "num_threads": None,
}


@pytest.mark.parametrize(
    ("scoring", "per_head"),
    [
        (Scoring(0.25), {"slopes": 2.0 ** -np.arange(1, HEADS + 1, dtype=np.float32)}),
        (Scoring(0.25, 11, softcap=0.7), {"sinks": np.linspace(-1, 2, HEADS, dtype=np.float32)}),
    ],
)
def test_paged_attention_equals_plain_attention(scoring, per_head) -> None:
    """Queries at the ends of three sequences in shuffled blocks; only their own last keys and
    values are written by the step.
    """
    rng = np.random.default_rng(0)
    lengths, counts = (40, 5, 17), (9, 5, 1)
    used = [-(-length // BLOCK_SIZE) for length in lengths]
    free = rng.permutation(np.arange(1, sum(used) + 1))
    tables = np.zeros((len(lengths), TABLE_BLOCKS), np.int32)
    # What nobody has written yet must not be seen, not even as NaN under a mask.
    shape = (sum(used) + 1, KV_HEADS)
    keys = np.full((*shape, HEAD_DIM, BLOCK_SIZE), np.nan, np.float32)
    values = np.full((*shape, BLOCK_SIZE, HEAD_DIM), np.nan, np.float32)
    steps, expected = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, : used[row]], free = free[: used[row]], free[used[row] :]
        heads = (HEADS, KV_HEADS, KV_HEADS)
        q, k, v = (rng.standard_normal((length, n, HEAD_DIM), np.float32) for n in heads)
        at = np.arange(length, dtype=np.int32)
        block, place = tables[row, at // BLOCK_SIZE], at % BLOCK_SIZE
        old = slice(length - count)
        keys[block[old], :, :, place[old]] = k[old]
        values[block[old], :, place[old]] = v[old]
        slots = block * BLOCK_SIZE + place
        rows = np.full(length, row, np.int32)
        steps.append([x[-count:] for x in (q, k, v, at, slots, rows)])
        expected.append(plain_attention(q, k, v, scoring, **per_head)[-count:])
    q, k, v, at, slots, rows = (
        Tensor(np.concatenate(parts), device="CPU").realize() for parts in zip(*steps, strict=True)
    )
    keys, values, table = (
        Tensor(array, device="CPU").contiguous().realize() for array in (keys, values, tables)
    )
    bound = Variable("num_blocks", 1, TABLE_BLOCKS).bind(max(used))
    work = Work(at, slots, rows, table, bound)
    pages = write(Pages(keys, values), k, v, slots)
    own = PerHead(**{name: Tensor(each, device="CPU").realize() for name, each in per_head.items()})
    found = attend(q, pages, work, scoring, own, HEAD_DIM).numpy()
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "llama", "mistral-window", "qwen2", "qwen3", "granite", "olmo2"),
        *("gemma2", "gemma3", "mpt", "qwen2_moe", "gpt_oss", "deepseek_v2"),
    ],
)
def test_mixed_batches_generate_the_same_ids_as_transformers(name: str, tmp_path: Path) -> None:
    model, path = tiny_models.save(name, tmp_path)
    prompts = [tiny_models.text(length, seed) for seed, length in enumerate((40, 5, 17, 1, 33))]
    driver = RunnerDriver(build_runner(open_model(path), RunnerConfig(**SETTINGS)))
    found = driver.generate([driver.add(prompt) for prompt in prompts], NUM_NEW, chunk=6)
    for prompt, ours in zip(prompts, found, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ours == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": "int3"}, "float32"),
        ({"device": "abacus"}, "cuda"),
        ({"device": "cuda:7"}, "cuda:7"),
        ({"attention": "triton"}, "triton"),
        ({"num_threads": 2}, "one thread"),
        ({"kv_dtype": "int8"}, "native"),
        ({"numerics": "invariant"}, "native"),
        ({"quantization": "fp8"}, "torch"),
        ({"max_seq_len": tiny_models.MAX_POSITION + 1}, "learned positions"),
    ],
)
def test_unusable_settings_are_refused_by_name(changes, word, tmp_path: Path) -> None:
    _, path = tiny_models.save("gpt2", tmp_path)
    with pytest.raises(ConfigError, match=word):
        build_runner(open_model(path), RunnerConfig(**SETTINGS | changes))


@pytest.mark.parametrize(
    ("compiler", "advice"),
    [("clang-that-is-not-there", "apt-get install clang"), ("true", "unset CC")],
)
def test_a_missing_or_broken_clang_is_reported_with_advice(compiler, advice, monkeypatch) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(ConfigError, match=advice):
        device.find_device("cpu", "auto")
