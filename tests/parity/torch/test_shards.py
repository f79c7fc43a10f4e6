"""Ranks compute what one process computes: three families in processes, many more in threads."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import psutil
import pytest
import torch

from engine.architectures.base import ModelConfig
from engine.core.errors import ConfigError
from engine.core.sandbox.liveness import TICK_S
from engine.core.shards.layout import ShardLayout
from engine.runtime.loop import REMOTE_POLL_S
from engine.runtime.model_runner import ModelRunner, RunnerConfig, RunnerLostError
from engine.torch.execution.build import build_runner
from engine.torch.execution.cache import CacheGroups, PagedCache
from engine.torch.execution.distributed import group as groups
from engine.torch.execution.distributed.model_shard import (
    ModelShard,
    check_shards,
)
from engine.torch.execution.distributed.remote import free_port
from engine.torch.execution.distributed.sharded_runner import (
    ShardedRunner,
    open_group,
)
from engine.torch.models.loading import build_model
from engine.weights.model import ModelSource, open_model
from tests.parity import tiny_models
from tests.parity.runner_driver import RunnerDriver
from tests.support.references.shard_ranks import Forks, Meeting, ThreadRanks

CPU = torch.device("cpu")
NUM_PROMPTS, NUM_NEW = 200, 8
TIE_NATS = 0.5  # as in `engine compare`
CONFIG = RunnerConfig(
    device="cpu",
    dtype="float32",
    block_size=4,
    num_blocks=2400,
    max_slots=NUM_PROMPTS,
    max_seq_len=tiny_models.MAX_POSITION,
    num_threads=1,
)
# Two and four ranks of each family. Heads are divided, or layers, or both.
GROUPS = [
    ("llama-four-ways", 2, 1),
    ("llama-four-ways", 4, 1),
    ("qwen3", 2, 1),
    ("qwen3", 2, 2),
    ("gpt2", 1, 2),
    ("gpt2", 4, 1),
]
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
# A family for each kind of weight that is cut: biases, fused and transposed matrices, tied tables,
# copied KV heads, experts, shared experts, latent attention, sinks, parallel blocks, windows.
CUT = [
    *[("llama-biases", 2), ("llama-tied", 6), ("gpt2", 4), ("gpt2-untied", 2), ("phi3", 2)],
    *[("glm4", 2), ("qwen2", 2), ("granite", 2), ("gemma2", 2), ("gemma3", 6), ("cohere", 2)],
    *[("gpt_neox", 2), ("starcoder2", 2), ("mixtral", 2), ("qwen2_moe", 2), ("gpt_oss", 2)],
    *[("deepseek_v2", 2), ("deepseek_v3", 6), ("ministral", 2)],
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads crawl where other processes share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@cache
def model(name: str) -> ModelSource:
    return open_model(tiny_models.save(name, Path(mkdtemp()))[1])


@contextmanager
def ranks(name: str, tensor: int, pipeline: int, forks: Forks) -> Iterator[ShardedRunner]:
    config = replace(CONFIG, tensor_parallel=tensor, pipeline_parallel=pipeline)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "start_child", forks.start)
        runner = open_group(model(name), config)
    try:
        yield runner
    finally:
        runner.close()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    lengths = rng.integers(1, 30, NUM_PROMPTS)
    return [rng.integers(3, tiny_models.VOCAB, length).tolist() for length in lengths]


Answer = tuple[list[int], list[dict[int, float]]]


def answers(runner: ModelRunner) -> tuple[list[Answer], bytes]:
    """The greedy tokens of each prompt with the logprobs of the best five, and all logprobs' bits.
    Prompts are computed in parts, beside each other.
    """
    driver = RunnerDriver(runner)
    tracks = [driver.add(prompt) for prompt in prompts()]
    tops: dict[int, list[dict[int, float]]] = {track.slot: [] for track in tracks}
    bits = []
    while open_tracks := [t for t in tracks if len(t.tokens) - t.num_prompt < NUM_NEW]:
        work = [(t, min(19, len(t.tokens) - t.num_computed)) for t in open_tracks]
        ending = [t for t, count in work if t.num_computed + count == len(t.tokens)]
        output = driver.step(work, num_logprobs=[5] * len(ending))
        assert output.finite.all()
        if output.top_ids is not None and output.top_logprobs is not None:
            bits.append(output.top_logprobs.tobytes())
            rows = zip(ending, output.top_ids, output.top_logprobs, strict=True)
            for track, ids, values in rows:
                tops[track.slot].append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
    return [(t.tokens[t.num_prompt :], tops[t.slot]) for t in tracks], b"".join(bits)


@cache
def alone(name: str) -> list[Answer]:
    runner = build_runner(model(name), CONFIG)
    found, _ = answers(runner)
    runner.close()
    return found


def check_same(found: list[Answer], expected: list[Answer]) -> int:
    """Token for token, or parting at a near tie. Returns how many part."""
    num_parted = 0
    for (ours, our_tops), (theirs, their_tops) in zip(found, expected, strict=True):
        if ours == theirs:
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        a, b = ours[at], theirs[at]
        gap = our_tops[at][a] - our_tops[at][b] + their_tops[at][b] - their_tops[at][a]
        assert gap <= TIE_NATS, (ours, theirs)
        num_parted += 1
    return num_parted


@pytest.mark.integration
@pytest.mark.parametrize(("name", "tensor", "pipeline"), GROUPS)
def test_ranks_generate_the_same_ids_as_one_process(
    name: str, tensor: int, pipeline: int, forks: Forks
) -> None:
    with ranks(name, tensor, pipeline, forks) as runner:
        found, bits = answers(runner)
        assert {each for each in forks.listening() if each not in LOOPBACK} == set()
    check_same(found, alone(name))
    if tensor == 2 and pipeline == 1:
        with ranks(name, tensor, pipeline, forks) as runner:
            assert answers(runner)[1] == bits, "sums are added in the order of the ranks"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sharding_the_default_model_gives_the_same_ids(default_model: Path, forks: Forks) -> None:
    """Its nine heads can be divided by three, its layers by any number."""
    config = replace(CONFIG, max_seq_len=64)
    source = open_model(default_model)
    runner = build_runner(source, config)
    expected, _ = answers(runner)
    runner.close()
    for tensor, pipeline in ((3, 1), (1, 2)):
        cut = replace(config, tensor_parallel=tensor, pipeline_parallel=pipeline)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(groups, "start_child", forks.start)
            runner = open_group(source, cut)
        found, _ = answers(runner)
        runner.close()
        num_parted = check_same(found, expected)
        print(f"-tp {tensor} -pp {pipeline}: {num_parted} of {len(found)} part at a near tie")


@pytest.mark.integration
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_a_rank_that_joins_over_tcp_computes_the_same(
    tensor: int, pipeline: int, forks: Forks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last rank joins over TCP. With a pipeline, it samples. A rank with another token is
    refused, and the engine goes on waiting.
    """
    for name, token in (("right", "0123456789abcdef"), ("wrong", "fedcba9876543210")):
        (tmp_path / name).write_text(token + "\n")
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    config = replace(
        CONFIG,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        remote_ranks=1,
        shard_listen=address,
        shard_token="0123456789abcdef",
    )

    def start_others() -> None:
        while "waiting for 1 ranks" not in caplog.text:
            time.sleep(0.02)
        forks.join(address, str(tmp_path / "wrong"))
        while "its token is wrong" not in caplog.text:
            time.sleep(0.02)
        forks.join(address, str(tmp_path / "right"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "start_child", forks.start)
        joining = threading.Thread(target=start_others)
        joining.start()
        runner = open_group(model("gpt2"), config)
        joining.join()
    found, _ = answers(runner)
    assert {each for each in forks.listening() if each not in LOOPBACK} == set()
    runner.close()
    check_same(found, alone("gpt2"))


@pytest.mark.parametrize(("name", "parts"), CUT)
def test_sharded_families_compute_the_same_as_unsharded_ones(name: str, parts: int) -> None:
    source, layout = model(name), ShardLayout(parts)
    check_shards(source.config, layout)
    tokens = torch.tensor(tiny_models.text())
    sizes = (tiny_models.MAX_POSITION, CPU, torch.float32)
    with torch.no_grad():
        expected = build_model(source.config, source.weights, *sizes).forward_sequence(tokens)
    meeting, found = Meeting(parts), {}
    shards = [ModelShard.of(source.config, source.weights, layout, r, CPU) for r in range(parts)]
    models = [build_model(each.config, each.weights(source.weights), *sizes) for each in shards]
    for shard, cut in zip(shards, models, strict=True):
        shard.connect(cut, ThreadRanks(layout, shard.rank, meeting))

    def run(rank: int) -> None:
        with torch.no_grad():
            found[rank] = models[rank].forward_sequence(tokens)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(parts):
        assert torch.equal(found[rank], found[0]), "all ranks have the same logits"
    assert (found[0] - expected).abs().max() < 2e-4


@pytest.mark.parametrize("layout", [(2, 1), (4, 1), (1, 3), (2, 3)])
def test_each_rank_holds_only_its_share_of_weights_and_kv_cache(layout: tuple[int, int]) -> None:
    """Bytes of the tensors that ranks have: weights, and the KV cache. A table of tokens belongs to
    the first stage, and the LM head to the last.
    """
    source, sizes = model("llama-four-ways"), ShardLayout(*layout)
    config = source.config
    table = 4 * config.vocab_size * config.hidden_size
    whole = sum(4 * int(np.prod(each.spec.shape)) for each in source.weights.values())
    whole_cache = sum(each.slots.nbytes for each in caches(config))
    for rank in range(sizes.num_ranks):
        shard = ModelShard.of(config, source.weights, sizes, rank, CPU)
        cut = build_model(
            shard.config,
            shard.weights(source.weights),
            tiny_models.MAX_POSITION,
            CPU,
            torch.float32,
            prepare=lambda model, shard=shard: shard.prepare(model, torch.float32, None),
        )
        held = sum(each.nbytes for each in cut.parameters())
        share = (whole - 2 * table) / sizes.num_ranks
        share += table * (shard.is_first + shard.is_last) / sizes.tensor
        assert held == pytest.approx(share, rel=0.1)
        own_cache = sum(each.slots.nbytes for each in caches(shard.config))
        assert own_cache == pytest.approx(whole_cache / sizes.num_ranks, rel=0.1)


def caches(config: ModelConfig) -> tuple[PagedCache, ...]:
    return CacheGroups(config, CONFIG, CPU, torch.float32).caches


@pytest.mark.integration
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_losing_a_rank_ends_all_ranks(fault: signal.Signals, forks: Forks) -> None:
    with ranks("gpt2", 2, 1, forks) as runner:
        pids = runner.group.pids
        driver = RunnerDriver(runner)
        driver.generate([driver.add([5, 6, 7])], 2)
        os.kill(pids[1], fault)
        with pytest.raises(RunnerLostError, match="rank 1 of 2"):
            driver.generate([driver.add([5, 6, 7])], 64)
        with pytest.raises(RunnerLostError, match="rank 1 of 2"):
            runner.check()
    for pid in pids:
        assert not psutil.pid_exists(pid)


def test_an_idle_engine_notices_a_lost_rank() -> None:
    """Within a second if it died, within four if it froze."""
    assert groups.WATCH_S + REMOTE_POLL_S < 1
    assert groups.FROZEN_AFTER_S + groups.WATCH_S + REMOTE_POLL_S + TICK_S < 4


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline", "message"),
    [
        ("llama", 4, 1, "does not divide the model's 6 heads and 2 KV heads; use 1, 2 or 6"),
        ("llama", 1, 4, "pipeline_parallel_size 4 is more than the model's 3 layers"),
        ("olmo2", 2, 1, "norms over all heads"),
        ("mpt", 2, 1, "ALiBi"),
        ("lfm2", 1, 2, "layers with a state"),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(
    name: str, tensor: int, pipeline: int, message: str
) -> None:
    config = replace(CONFIG, tensor_parallel=tensor, pipeline_parallel=pipeline)
    with pytest.raises(ConfigError, match=message):
        build_runner(model(name), config)


@pytest.mark.integration
def test_a_rank_that_cannot_load_reports_the_reason(forks: Forks, tmp_path: Path) -> None:
    source = replace(model("gpt2"), path=tmp_path / "gone")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(Exception, match="there is no model at"),
    ):
        patch.setattr(groups, "start_child", forks.start)
        open_group(source, replace(CONFIG, tensor_parallel=2))
