"""What every setting changes: a value of each, and what is seen of it where it is used."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.backends.custom.app import build_backend
from engine.backends.custom.engine_settings import backend_name
from tests.support.fakes.fake_backend import MODEL
from tests.support.servers.live_server import free_port
from tests.tables.settings import observed as see
from tests.tables.settings.observed import COMPLETION, COMPLETIONS, Look


@dataclass(frozen=True)
class Row:
    toml: str  # the value in a file; empty: the setting must not be in one
    value: Any
    look: Look
    seen: Any  # what the look tells with this value; it tells something else without it
    needs: dict[str, Any] = field(default_factory=dict)  # other settings that this one needs
    text: str = ""  # the value in a variable, if it is not written as in a file

    @property
    def written(self) -> str:
        return self.text or self.toml.strip("'")


SECRET = "0123456789abcdef0123"
FOLDER = Path(tempfile.mkdtemp(prefix="engine-tests-"))
MIB = 2**20
PORT, PROBE_PORT, GRPC_PORT = free_port(), free_port(), free_port()
TIERS = {"tiers.host_mb": 1, "tiers.disk_path": "kv"}
REDIS = {"tiers.redis_url_file": str(see.new_file("redis", "redis://localhost"))}
PREFILL = {"nodes.role": "prefill"}
TRACED = {"tracing.enabled": True}
TLS = PREFILL | {
    "server.tls_cert_file": str(see.new_file("cert.pem")),
    "server.tls_key_file": str(see.new_file("key.pem")),
}
NODE = {"server.node_token_file": str(see.new_file("node"))}
KEYED = {"server.api_key_file": str(see.new_file("api"))}
STORED = {"storage.path": str(FOLDER / "stored")}
WRONG = {"authorization": "Bearer wrong"}
ORIGIN = "http://page.example"


def option(toml: str, value: Any, name: str, seen: Any, **more: Any) -> Row:
    """A setting that becomes this option of an engine, and changes no other option."""
    return Row(toml, value, see.options, {name: seen}, **more)


def file(name: str, look: Look, seen: Any, content: str = SECRET, **more: Any) -> Row:
    path = see.new_file(name, content)
    return Row(f"'{path}'", path, look, seen, **more)


def secret(value: str, look: Look, seen: Any, **more: Any) -> Row:
    return Row("", value, look, seen, text=value, **more)


def path_of(name: str) -> tuple[str, Path]:
    return f"'{FOLDER / name}'", FOLDER / name


def keys_file() -> Row:
    from engine.core.key_file import add_key

    path = FOLDER / "keys.json"
    add_key(path, "somebody")
    return Row(f"'{path}'", path, see.status("GET", "/v1/models"), 401)


models, metrics = see.status("GET", "/v1/models"), see.status("GET", "/metrics")
SERVER = {
    "host": Row("'127.0.0.2'", "127.0.0.2", lambda s: see.bound(s)[0], "127.0.0.2"),
    "port": Row(str(PORT), PORT, lambda s: see.bound(s)[1] == PORT, True),
    "probe_port": Row(str(PROBE_PORT), PROBE_PORT, see.bound_probes, PROBE_PORT),
    "grpc_port": Row(str(GRPC_PORT), GRPC_PORT, see.grpc_port, GRPC_PORT),
    "api_key": secret(SECRET, models, 401),
    "api_key_file": file("api", models, 401),
    "keys_file": keys_file(),
    "admin_key": secret(SECRET, see.status("GET", "/v1/admin/status"), 401),
    "admin_key_file": file("admin", see.status("GET", "/v1/admin/status"), 401),
    "node_token": secret(SECRET, see.node_token, True),
    "node_token_file": file("node", see.node_token, True),
    "tls_cert_file": Row("'a.pem'", Path("a.pem"), see.peer("cert_file"), "a.pem", TLS),
    "tls_key_file": Row("'a.key'", Path("a.key"), see.peer("key_file"), "a.key", TLS),
    "insecure_no_auth": Row("true", True, see.exposure, None, {"server.host": "0.0.0.0"}),
    "max_concurrent_requests": Row("1", 1, see.together(COMPLETION), [200, 429]),
    "frontends": Row("3", 3, see.frontends, 3),
    "body_limit_mb": Row(
        "1", 1, see.status("POST", COMPLETIONS, COMPLETION | {"user": "x" * MIB}), 413
    ),
    "image_hosts": Row(
        "['other.invalid']",
        ("other.invalid",),
        see.refusal(see.fetch_image, capabilities=see.IMAGES),
        "messages[0].content[0].image_url.url: the server may not fetch images from this host.",
        text="other.invalid",
    ),
    "request_timeout_s": Row("7.5", 7.5, see.asked("timeout_s"), 7.5),
    "queue_timeout_s": Row("3.5", 3.5, see.asked("queue_timeout_s"), 3.5),
    "resume_requests": option("false", False, "max_revivals", 0),
    "max_revivals": option("3", 3, "max_revivals", 3),
    "drain_timeout_s": Row("4.5", 4.5, see.drained, 4.5),
    "enable_cors": Row(
        "true", True, see.header("access-control-allow-origin", origin=ORIGIN), ORIGIN
    ),
    "cors_origins": Row(
        f"['{ORIGIN}']",
        (ORIGIN,),
        see.header("access-control-allow-origin", origin="http://other.example"),
        None,
        {"server.enable_cors": True},
        text=ORIGIN,
    ),
    "allowed_hosts": Row(
        "['llm.example']",
        ("llm.example",),
        see.status("GET", "/v1/models", host="llm.example"),
        200,
        text="llm.example",
    ),
    "memory_budget_mb": Row("64", 64, see.residency, (True, 64, None)),
    "idle_unload_s": Row("8.5", 8.5, see.residency, (True, None, 8.5)),
    "ui": Row(
        "false", False, see.status("GET", "/", accept="text/html"), 404, {"server.dialects": ()}
    ),
    "dialects": Row("['vllm']", ("vllm",), see.status("GET", "/api/version"), 404, text="vllm"),
    "accept_any_model": Row(
        "true", True, see.status("POST", COMPLETIONS, COMPLETION | {"model": "absent"}), 200
    ),
    "max_logprobs": Row(
        "25", 25, see.status("POST", COMPLETIONS, COMPLETION | {"logprobs": 25}), 200
    ),
    "root_path": Row("'/llm'", "/llm", see.status("GET", "/llm/v1/models"), 200),
    "strict": Row("true", True, see.status("POST", COMPLETIONS, COMPLETION | {"num_ctx": 5}), 400),
    "moderation_model": Row(
        f"'{MODEL}'",
        MODEL,
        see.refusal(lambda client: client.post("/v1/moderations", json={"input": "a"})),
        "The moderation model's answer was cut off.",
    ),
}
MODEL_ROWS = {
    "model_path": option("'m.gguf'", "m.gguf", "model_path", "m.gguf"),
    "name": Row("'served'", "served", see.served_name, "served", {"model.backend": "native"}),
    "draft_model": option("'small.gguf'", "small.gguf", "draft_model", "small.gguf"),
    "backend": Row("'jax'", "jax", backend_name, "jax"),
    "options": Row(
        "{ base_url = 'http://h' }",
        {"base_url": "http://h"},
        see.error_of(build_backend),
        "model.options",
        {"model.backend": "native"},
    ),
    "adapters": option("{ tuned = '/a' }", {"tuned": "/a"}, "adapters", {"tuned": "/a"}),
    "adapter_directory": Row(*path_of("adapters"), see.adapter_status(FOLDER / "adapters"), 400),
    "device": option("'cuda:1'", "cuda:1", "device", "cuda:1"),
    "dtype": option("'float32'", "float32", "dtype", "float32"),
    "quantization": option("'int8'", "int8", "quantization", "int8"),
    "max_sequence_length": option("777", 777, "max_seq_len", 777),
}
CACHE = {
    "enabled": option("false", False, "cache_enabled", False),
    "max_size_mb": option("7", 7, "cache_bytes", 7 * MIB),
    "max_sequences": option("99", 99, "cache_max_sequences", 99),
    "eviction_policy": option("'lfu'", "lfu", "eviction_policy", "lfu"),
    "warm_file": file("warm", see.has("WarmStart"), True, '"a"\n'),
    "ttl_seconds": option("12.5", 12.5, "cache_ttl_s", 12.5),
    "kv_dtype": option("'int8'", "int8", "kv_dtype", "int8"),
    "block_size": option("32", 32, "block_size", 32),
}
TIER_ROWS = {
    "host_mb": Row("3", 3, see.tier("host_bytes"), 3 * MIB),
    "host_policy": Row("'fifo'", "fifo", see.tier("host_policy"), "fifo", TIERS),
    "host_ttl_s": Row("4.5", 4.5, see.tier("host_ttl_s"), 4.5, TIERS),
    "disk_path": Row("'blocks'", Path("blocks"), see.tier("disk_path"), "blocks"),
    "disk_mb": Row("5", 5, see.tier("disk_bytes"), 5 * MIB, TIERS),
    "disk_policy": Row("'lfu'", "lfu", see.tier("disk_policy"), "lfu", TIERS),
    "disk_ttl_s": Row("6.5", 6.5, see.tier("disk_ttl_s"), 6.5, TIERS),
    "redis_url": secret("redis://a", see.tier("redis_url"), "redis://a"),
    "redis_url_file": file("r", see.tier("redis_url"), "redis://b", "redis://b"),
    "redis_mb": Row("7", 7, see.tier("redis_bytes"), 7 * MIB, REDIS),
    "redis_policy": Row("'fifo'", "fifo", see.tier("redis_policy"), "fifo", REDIS),
    "redis_ttl_s": Row("8.5", 8.5, see.tier("redis_ttl_s"), 8.5, REDIS),
}
PERFORMANCE = {
    "batch_size": option("13", 13, "max_slots", 13),
    "max_batch_tokens": option("1111", 1111, "max_batch_tokens", 1111),
    "max_queued_requests": option("222", 222, "max_queued", 222),
    "memory_pool_size_mb": option("33", 33, "pool_bytes", 33 * MIB),
    "gpu_memory_utilization": option("0.5", 0.5, "gpu_memory_utilization", 0.5),
    "tensor_parallel_size": option("3", 3, "tensor_parallel_size", 3),
    "pipeline_parallel_size": option("2", 2, "pipeline_parallel_size", 2),
    "use_mmap": option("false", False, "use_mmap", False),
    "threads": option("5", 5, "threads", 5),
    "attention": option("'reference'", "reference", "attention", "reference"),
    "numerics": option("'fast'", "fast", "numerics", "fast"),
    "speculation": option("'off'", "off", "speculation", "off"),
    "max_adapters": option("4", 4, "max_adapters", 4),
    "max_adapter_rank": option("44", 44, "max_adapter_rank", 44),
    "adapter_memory_mb": option("55", 55, "adapter_bytes", 55 * MIB),
    "affinity": option("'off'", "off", "affinity", "off"),
}
SHARDS = {
    "remote_ranks": option("4", 4, "remote_ranks", 4),
    "listen": option("'10.0.0.1:7000'", "10.0.0.1:7000", "shard_listen", "10.0.0.1:7000"),
    "token": Row("", SECRET, see.options, {"shard_token": SECRET}, text=SECRET),
    "token_file": file("shard", see.options, {"shard_token": SECRET}),
}
NODES = {
    "role": Row("'decode'", "decode", see.peer("role"), "decode"),
    "min_prefill_tokens": Row("9", 9, see.min_prefill, 9, NODE),
    "block_listen": Row("'h:71'", "h:71", see.peer("listen"), "h:71", PREFILL),
    "block_host": Row("'node-a'", "node-a", see.peer("host"), "node-a", PREFILL),
    "block_memory_mb": Row("66", 66, see.peer("kept_bytes"), 66 * MIB, PREFILL),
}
LOGGING = {
    "level": option("'error'", "error", "log_level", "error"),
    "format": option("'json'", "json", "log_format", "json"),
    "log_requests": Row("false", False, see.logged, []),
    "slow_request_s": Row("1e-9", 1e-9, see.logged, ["request", "slow request"]),
}
METRICS = {
    "enabled": Row("false", False, metrics, 501),
    "endpoint": Row("'/figures'", "/figures", see.status("GET", "/figures"), 200),
    "token": secret(SECRET, metrics, 401),
    "token_file": file("metrics", metrics, 401),
}
TRACING = {
    "enabled": Row("true", True, see.has("Telemetry"), True),
    "endpoint": Row("'http://h:1'", "http://h:1", see.traced("endpoint"), "http://h:1", TRACED),
    "protocol": Row("'grpc'", "grpc", see.traced("protocol"), "grpc", TRACED),
    "sample_ratio": Row(
        "0.25",
        0.25,
        see.traced("sampler"),
        "ParentBased{root:TraceIdRatioBased{0.25},remoteParentSampled:AlwaysOnSampler,"
        "remoteParentNotSampled:AlwaysOffSampler,localParentSampled:AlwaysOnSampler,"
        "localParentNotSampled:AlwaysOffSampler}",
        TRACED,
    ),
    "slow_s": Row("2.5", 2.5, see.traced("slow_s"), 2.5, TRACED),
    "capture_content": Row("true", True, see.traced("captures_content"), True, TRACED),
}
LIMITS = {
    "requests_per_minute": Row("1", 1, see.status("POST", COMPLETIONS, COMPLETION, times=2), 429),
    "tokens_per_minute": Row("30", 30, see.status("POST", COMPLETIONS, COMPLETION, times=2), 429),
    "max_concurrent": Row("1", 1, see.together(COMPLETION), [200, 429]),
    "max_queued": Row("1", 1, see.waiting(COMPLETION), [200, 429]),
    "max_queued_tokens": Row("15", 15, see.waiting(COMPLETION), [200, 429]),
    "auth_failures_per_minute": Row(
        "1", 1, see.status("GET", "/v1/models", times=2, **WRONG), 429, KEYED
    ),
    "redis_url": secret("redis://a", see.redis_of_limits, "redis://a"),
    "redis_url_file": file("limits", see.redis_of_limits, "redis://a", "redis://a"),
}
STORAGE = {
    "path": Row(*path_of("here"), see.databases(FOLDER / "here"), True),
    "response_ttl_s": Row("500", 500.0, see.kept_for, 500),
    "max_responses": Row("2", 2, see.stored, 2, STORED),
    "max_size_mb": Row("1", 1, see.upload_status, 507),
    "file_ttl_s": Row("900", 900.0, see.file_life, 900),
}
REQUESTS = {
    "keep": Row("0", 0, see.told("/v1/admin/requests", "kept"), 0),
    "show_text": Row("true", True, see.shown_text, {"prompt_goes_on": "a", "cached_goes_on": "b"}),
    "record": Row("true", True, see.has("Recorder"), True),
    "max_recorded": Row("2", 2, see.num_recorded, 2, STORED | {"requests.record": True}),
}
FINETUNING = {
    "device": Row("'cuda:1'", "cuda:1", see.training("device"), "cuda:1"),
    "threads": Row("3", 3, see.training("threads"), 3),
    "memory_mb": Row("22", 22, see.training("memory_bytes"), 22 * MIB),
    "checkpoint_s": Row("5.5", 5.5, see.training("checkpoint_s"), 5.5),
    "yield_to_requests": Row("false", False, see.holds, False),
}
INTERP = {
    "max_capture_mb": Row("1", 1, see.capture_bytes, MIB),
    "max_stored_mb": Row("1", 1, see.results(see.put_two_mebibytes), 413),
    "result_ttl_s": Row("77.5", 77.5, see.results(see.put_two_mebibytes), 77.5),
    "inline_kb": Row("0", 0, see.is_inline, False),
    "vectors_dir": Row(*path_of("vectors"), lambda s: s.vectors_dir, FOLDER / "vectors"),
}
SECTIONS = {
    "server": SERVER,
    "model": MODEL_ROWS,
    "cache": CACHE,
    "tiers": TIER_ROWS,
    "performance": PERFORMANCE,
    "shards": SHARDS,
    "nodes": NODES,
    "logging": LOGGING,
    "metrics": METRICS,
    "tracing": TRACING,
    "limits": LIMITS,
    "storage": STORAGE,
    "requests": REQUESTS,
    "finetuning": FINETUNING,
    "interp": INTERP,
}
ROWS = {f"{name}.{key}": row for name, rows in SECTIONS.items() for key, row in rows.items()}
# Names of flags that other servers have, each with its setting.
OTHER_FLAGS = {
    "--sleep-idle-seconds": "server.idle_unload_s",
    "--api-server-count": "server.frontends",
    "--webui/--no-webui": "server.ui",
    "--served-model-name": "model.name",
    "--alias": "model.name",
    "-a": "model.name",
    "--model-draft": "model.draft_model",
    "-md": "model.draft_model",
    "--speculative-model": "model.draft_model",
    "--speculative-draft-model-path": "model.draft_model",
    "-q": "model.quantization",
    "--max-model-len": "model.max_sequence_length",
    "--context-length": "model.max_sequence_length",
    "--ctx-size": "model.max_sequence_length",
    "-c": "model.max_sequence_length",
    "--enable-prefix-caching/--no-enable-prefix-caching": "cache.enabled",
    "--kv-cache-dtype": "cache.kv_dtype",
    "--max-num-seqs": "performance.batch_size",
    "--max-running-requests": "performance.batch_size",
    "--parallel": "performance.batch_size",
    "-np": "performance.batch_size",
    "--max-num-batched-tokens": "performance.max_batch_tokens",
    "--mem-fraction-static": "performance.gpu_memory_utilization",
    "-tp": "performance.tensor_parallel_size",
    "--tp-size": "performance.tensor_parallel_size",
    "--tp": "performance.tensor_parallel_size",
    "-pp": "performance.pipeline_parallel_size",
    "--pp-size": "performance.pipeline_parallel_size",
    "-t": "performance.threads",
}
