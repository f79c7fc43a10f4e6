"""From settings to an engine: each one arrives where it acts, in its unit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engine.backends.custom.engine_settings import engine_options
from engine.core.config import load_settings
from engine.core.errors import ModelFormatError
from engine.core.interfaces.request import GenerateRequest, Ready, SamplingParams, Stop
from engine.frontend.text_cache import TextCache, key_of
from engine.frontend.text_model import load_text
from engine.ipc.options import EngineOptions, PeerOptions, TierOptions
from engine.runtime.model_runner import DeviceInfo, RunnerConfig, RunnerSpec
from engine.runtime.requests.grammar import Grammars
from engine.worker import main as worker
from engine.worker.loading import runner_config
from engine.worker.memory import MemoryPlan
from tests.support.toy_engine.grammar import vocabulary
from tests.support.toy_engine.runner import VOCAB, ToyRunner

SETTINGS = {
    "model.model_path": "m.gguf",
    "model.device": "cpu",
    "model.dtype": "float32",
    "model.quantization": "int8",
    "model.max_sequence_length": 777,
    "performance.use_mmap": False,
    "performance.threads": 3,
    "performance.attention": "reference",
    "performance.numerics": "fast",
    "performance.affinity": "off",
    "server.max_revivals": 5,
    "performance.batch_size": 13,
    "performance.max_batch_tokens": 1111,
    "performance.max_queued_requests": 222,
    "performance.memory_pool_size_mb": 33,
    "performance.gpu_memory_utilization": 0.5,
    "finetuning.device": "cuda:1",
    "finetuning.memory_mb": 22,
    "performance.tensor_parallel_size": 3,
    "performance.pipeline_parallel_size": 2,
    "shards.remote_ranks": 4,
    "shards.listen": "10.0.0.1:7000",
    "nodes.role": "prefill",
    "nodes.block_listen": "10.0.0.1:7001",
    "nodes.block_host": "node-a",
    "nodes.block_memory_mb": 66,
    "server.tls_cert_file": "node.pem",
    "server.tls_key_file": "node.key",
    "performance.speculation": "off",
    "model.draft_model": "small.gguf",
    "model.adapters": {"tuned": "/adapters/tuned"},
    "performance.max_adapters": 3,
    "performance.max_adapter_rank": 44,
    "performance.adapter_memory_mb": 55,
    "cache.kv_dtype": "float32",
    "cache.block_size": 32,
    "cache.enabled": False,
    "cache.max_size_mb": 7,
    "cache.max_sequences": 99,
    "cache.ttl_seconds": 12.5,
    "cache.eviction_policy": "lfu",
    "tiers.host_mb": 1,
    "tiers.host_policy": "fifo",
    "tiers.host_ttl_s": 10.0,
    "tiers.disk_path": "kv",
    "tiers.disk_mb": 2,
    "tiers.disk_policy": "lfu",
    "tiers.disk_ttl_s": 20.0,
    "tiers.redis_mb": 3,
    "tiers.redis_policy": "lfu",
    "tiers.redis_ttl_s": 30.0,
    "logging.level": "error",
    "logging.format": "json",
}
OPTIONS = EngineOptions(
    model_path="m.gguf",
    framework="toy",
    device="cpu",
    dtype="float32",
    quantization="int8",
    max_seq_len=777,
    use_mmap=False,
    threads=3,
    attention="reference",
    numerics="fast",
    affinity="off",
    kv_dtype="float32",
    max_slots=13,
    max_batch_tokens=1111,
    max_queued=222,
    max_revivals=5,
    pool_bytes=33 * 1024 * 1024,
    gpu_memory_utilization=0.5,
    training_device="cuda:1",
    training_bytes=22 * 1024 * 1024,
    tensor_parallel_size=3,
    pipeline_parallel_size=2,
    remote_ranks=4,
    shard_listen="10.0.0.1:7000",
    shard_token="0123456789abcdef",
    speculation="off",
    draft_model="small.gguf",
    adapters={"tuned": "/adapters/tuned"},
    max_adapters=3,
    max_adapter_rank=44,
    adapter_bytes=55 * 1024 * 1024,
    block_size=32,
    cache_enabled=False,
    cache_bytes=7 * 1024 * 1024,
    cache_max_sequences=99,
    cache_ttl_s=12.5,
    eviction_policy="lfu",
    tiers=TierOptions(
        host_bytes=2**20,
        host_policy="fifo",
        host_ttl_s=10.0,
        disk_path="kv",
        disk_bytes=2 * 2**20,
        disk_policy="lfu",
        disk_ttl_s=20.0,
        redis_url="redis://localhost",
        redis_bytes=3 * 2**20,
        redis_policy="lfu",
        redis_ttl_s=30.0,
    ),
    peers=PeerOptions(
        role="prefill",
        listen="10.0.0.1:7001",
        host="node-a",
        cert_file="node.pem",
        key_file="node.key",
        kept_bytes=66 * 2**20,
    ),
    log_level="error",
    log_format="json",
)
UNTIERED = msgspec.structs.replace(OPTIONS, tiers=None, peers=None)
SPEC = RunnerSpec(block_size=4, num_blocks=65, max_slots=8, max_seq_len=64, vocab_size=8, depth=0)


def test_every_engine_option_has_its_own_setting():
    secret = {
        "LLM_ENGINE_TIERS__REDIS_URL": "redis://localhost",
        "LLM_ENGINE_SHARDS__TOKEN": "0123456789abcdef",
    }
    settings = load_settings(None, SETTINGS, secret).settings
    assert engine_options(settings, "toy") == OPTIONS
    plain = EngineOptions(model_path="m", framework="toy")
    same = [
        name
        for name in EngineOptions.__struct_fields__
        if getattr(OPTIONS, name) == getattr(plain, name)
    ]
    # `num_oom_kills` is no setting: the frontend counts them.
    unset = ["framework", "num_oom_kills"]
    assert same == unset, "an option at its default would not be noticed"


@pytest.mark.parametrize("name", ["resume_requests", "survive"])  # the second is its earlier name
def test_without_resume_requests_nothing_is_revived(name, tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text(f"[server]\n{name} = false\n")
    variables = {f"LLM_ENGINE_SERVER__{name.upper()}": "false"}
    for loaded in (
        load_settings(None, {f"server.{name}": False}, {}),
        load_settings(None, {}, variables),
        load_settings(file, {}, {}),
    ):
        assert engine_options(loaded.settings, "toy").max_revivals == 0
        assert loaded.origins["server.resume_requests"] != "default"


def test_engine_options_survive_serialization():
    sent = msgspec.msgpack.encode(OPTIONS)
    assert msgspec.msgpack.decode(sent, type=EngineOptions) == OPTIONS


GIB = 2**30


@pytest.mark.parametrize(
    ("framework", "device", "free_gib", "num_cpus", "sizes"),
    [
        ("torch", "cuda:0", 139, 16, (1024, 8192)),
        ("torch", "cuda:0", 24, 16, (512, 4096)),
        ("torch", "cuda:0", 8, 16, (128, 2048)),
        ("native", "cpu", 20, 2, (64, 2048)),
        ("native", "cpu", 20, 8, (128, 2048)),
        ("native", "cpu", 20, 64, (256, 2048)),
        ("jax", "cuda:0", 139, 2, (64, 2048)),
    ],
)
def test_unset_sizes_are_chosen_by_the_device(framework, device, free_gib, num_cpus, sizes):
    settings = load_settings(None, {"model.model_path": "m.gguf"}, {}).settings
    options = engine_options(settings, framework)
    planned = options.planned(device, free_gib * GIB, num_cpus)
    assert (planned.max_slots, planned.max_batch_tokens) == sizes
    assert (planned.kv_target_bytes is not None) == (framework == "native")
    assert planned.cache_bytes is None


def test_given_sizes_are_kept_and_derived_sizes_agree():
    alone = msgspec.structs.replace(OPTIONS, tensor_parallel_size=1, pipeline_parallel_size=1)
    assert alone.planned("cuda:0", 139 * GIB, 2) == alone
    sizes = {"pool_bytes": OPTIONS.pool_bytes // 6, "cache_bytes": OPTIONS.cache_bytes // 6}
    of_a_rank = msgspec.structs.replace(OPTIONS, **sizes)
    assert OPTIONS.planned("cuda:0", 139 * GIB, 2) == of_a_rank
    few = msgspec.structs.replace(OPTIONS, max_slots=0, max_batch_tokens=50)
    assert few.planned("cpu", 20 * GIB, 2).max_slots == 50
    many = msgspec.structs.replace(OPTIONS, max_slots=4096, max_batch_tokens=0)
    assert many.planned("cpu", 20 * GIB, 2).max_batch_tokens == 4096


def test_the_memory_plan_reaches_the_runner_config():
    plan = MemoryPlan(1, 2, num_blocks=55, max_slots=6, max_seq_len=77, bytes_per_token=1, notes=())
    config = runner_config(OPTIONS, DeviceInfo("cpu:1", "bfloat16", 0), plan)
    assert config == RunnerConfig(
        device="cpu:1",
        dtype="bfloat16",
        block_size=32,
        num_blocks=55,
        max_slots=6,
        max_seq_len=77,
        num_threads=3,
        attention="reference",
        max_batch_tokens=1111,
        kv_dtype="float32",
        numerics="fast",
        affinity="off",
        quantization="int8",
        tensor_parallel=3,
        pipeline_parallel=2,
        remote_ranks=4,
        shard_listen="10.0.0.1:7000",
        shard_token="0123456789abcdef",
    )


def test_cache_bytes_bound_the_prefix_cache():
    options = msgspec.structs.replace(OPTIONS, cache_enabled=True, cache_bytes=1000)
    kv = worker.build_scheduler(SPEC, options, bytes_per_token=10).kv
    assert kv.sharing and kv.pool.num_blocks == 65 and kv.block_size == 4
    assert kv._max_cached_blocks == 1000 // (10 * 4) and kv._max_cached_sequences == 99
    assert kv.radix._ttl_s == 12.5
    node = SimpleNamespace(num_uses=3, last_used=5, created=7)
    assert kv.radix._leaves._key(node) == (3, 5), "by how often"
    assert not worker.build_scheduler(SPEC, OPTIONS, 10).kv.sharing
    assert kv.target_blocks is None
    unbounded = msgspec.structs.replace(
        OPTIONS, framework="native", cache_bytes=None, pool_bytes=None
    )
    kv = worker.build_scheduler(SPEC, unbounded, 2**20).kv
    assert kv._max_cached_blocks is None and kv.target_blocks == 224 // 4


def test_a_step_is_no_larger_than_the_runner_benefits_from():
    for most, expected in ((None, 1111), (500, 500), (5000, 1111)):
        spec = replace(SPEC, max_step_tokens=most)
        loop = worker.build_loop(ToyRunner(spec), UNTIERED, 10, SimpleNamespace())
        assert loop._budget.tokens(0, 0) == expected


@pytest.mark.parametrize("is_usable", [True, False])
def test_the_grammar_vocabulary_is_loaded_once_before_the_engine_is_ready(is_usable):
    """A model without a usable one is served all the same."""
    loads: list[int] = []

    def load():
        loads.append(len(sent))
        if not is_usable:
            raise ModelFormatError("there is no tokenizer")
        return vocabulary()

    sent: list = []
    inbox = [[Stop()]]
    channel = SimpleNamespace(
        send=sent.append, poll=lambda timeout_s: inbox.pop(0) if inbox else []
    )
    grammars = Grammars(load)
    grammars.prepare()
    config = RunnerConfig("cpu", "float32", 4, 65, 8, 64, None)
    loaded = (ToyRunner(SPEC), config, MemoryPlan(0, 0, 65, 8, 64, 10, ()))
    pulse = SimpleNamespace(beat=lambda busy, step_timeout_s: None, watch=lambda loop: None)
    worker.serve_runner(loaded, UNTIERED, channel, pulse, lambda: None, 0.0, grammars)
    assert isinstance(sent[0], Ready) and loads == [0]


def test_the_cached_tokenizer_gives_the_same_grammar_vocabulary(default_model: Path):
    options = msgspec.structs.replace(OPTIONS, model_path=str(default_model))
    text = load_text(default_model)  # it is cached from now on
    assert TextCache().read(default_model, key_of(default_model)) is not None
    found, expected = worker._vocabulary(options), text.vocabulary()
    assert found.tokens == expected.tokens and found.special_ids == expected.special_ids
    assert found.eos_ids == expected.eos_ids == text.eos_ids
    assert found.encode("Hello there") == expected.encode("Hello there")


def test_the_engine_reports_its_memory_after_warm_up(monkeypatch):
    sent: list = []
    runner = ToyRunner(SPEC)
    inbox = [[GenerateRequest(request_id="r", prompt=(1,), params=SamplingParams())], [Stop()]]
    channel = SimpleNamespace(
        send=sent.append, poll=lambda timeout_s: inbox.pop(0) if inbox else []
    )
    config = RunnerConfig("cpu", "float32", 4, 65, 8, 64, None)
    plan = MemoryPlan(0, 0, 65, 8, 64, 10, ())
    loaded: list = []
    pulse = SimpleNamespace(beat=lambda busy, step_timeout_s: None, watch=lambda loop: None)
    worker.serve_runner(
        (runner, config, plan),
        UNTIERED,
        channel,
        pulse,
        lambda: loaded.append(runner.num_tokens),
        started_at=0.0,
    )
    ready = sent[0]
    assert isinstance(ready, Ready) and loaded == [1], "warmed up before anything is announced"
    told = (ready.max_seq_len, ready.num_blocks, ready.block_size, ready.max_slots)
    assert told == (64, 64, 4, 8) and (ready.dtype, ready.device) == ("float32", "cpu")
    assert runner.closed and runner.spec.vocab_size == VOCAB
