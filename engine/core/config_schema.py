"""Defines every setting, with its section, type, bounds, default and flag.

A key has the same name everywhere: `[server] port` in TOML, `LLM_ENGINE_SERVER__PORT` in the
environment, `--port` on the command line. All of these follow from the field and its `Flag`. An
engine option of the same name gets the setting's value (`backends/custom/engine_settings.py`).
Sizes in `_mb` are MiB. Settings are frozen: nothing changes them after loading. The sentence below
a field is its line in docs/reference/settings.md.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from engine.core.config_storage import (
    FinetuningSettings,
    InterpSettings,
    RequestsSettings,
    StorageSettings,
)
from engine.core.config_types import (
    Dialects,
    Flag,
    Frontends,
    Megabytes,
    Name,
    NodeSettings,
    Origins,
    Policy,
    Secret,
    Section,
    ShardSettings,
    Strings,
    TierSettings,
    check_adapters,
    check_options,
    check_power_of_two,
    lowercase,
    parse_options,
)

if TYPE_CHECKING:
    from engine.core.config_presets import PresetTable
    from engine.core.config_tables import AdapterTable, BackendTable, ModelTable, PluginTable

RESERVED_PATHS = ("/v1", "/health", "/livez", "/readyz", "/generate", "/api", "/openai")


class ServerSettings(Section):
    host: Annotated[str, Flag("Address to listen on.")] = Field(
        default="127.0.0.1", min_length=1, max_length=253
    )
    """Address to listen on; anything but loopback needs an API key."""
    port: Annotated[int, Flag("Port to listen on; 0: any free one.")] = Field(
        default=8080, ge=0, le=65535
    )
    """Port to listen on; 0 takes any free port."""
    probe_port: int | None = Field(default=None, ge=0, le=65535)
    """Second port that serves the probes alone, from a thread with its own event loop."""
    grpc_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Open Inference Protocol by gRPC, for clients of KServe and Triton."""
    api_key: Secret | None = None
    """API key that every client sends; set by a variable or by `server.api_key_file`."""
    api_key_file: Path | None = None
    """File that holds the API key."""
    keys_file: Annotated[Path | None, Flag("Named keys, as `engine keys` makes them.")] = None
    """File of several named keys, as `engine keys` writes it."""
    admin_key: Secret | None = None
    """Key for `/v1/admin`; set by a variable or by `server.admin_key_file`."""
    admin_key_file: Path | None = None
    """File that holds the administrator's key."""
    node_token: Secret | None = None
    """Token of nodes that may join this server; unset, none may."""
    node_token_file: Path | None = None
    """File that holds the node token, as `engine node token` writes it."""
    tls_cert_file: Path | None = None
    """Certificate chain in PEM format; if set, the server speaks HTTPS only."""
    tls_key_file: Path | None = None
    """Private key of `server.tls_cert_file`."""
    insecure_no_auth: Annotated[bool, Flag("Serve other machines without a key.")] = False
    """Allow other machines to reach the server without a key."""
    max_concurrent_requests: int = Field(default=8192, ge=1, le=65536)
    """Requests admitted at once; the server answers 429 beyond that."""
    frontends: Annotated[
        Frontends,
        Flag(
            "Frontend processes, or `auto`: several if the engine runs on a GPU.",
            "--frontends --api-server-count",
            heading="Memory and speed",
            metavar="NUMBER",
        ),
    ] = "auto"
    """Frontend processes. More than one helps only on a GPU; `auto` has three there."""
    body_limit_mb: int = Field(default=8, ge=1, le=1024)
    """Max size of a request body in MiB."""
    image_hosts: Strings = ()
    """Hosts from which images of requests may be fetched. `*` allows all public hosts."""
    request_timeout_s: float = Field(default=600.0, gt=0, le=86400)
    """Max duration of a request; it is aborted then."""
    queue_timeout_s: float = Field(default=60.0, gt=0, le=86400)
    """Max time that a request waits for its first step; it is refused then."""
    resume_requests: bool = True
    """If the engine process dies, open requests continue in a new one, and new requests wait."""
    max_revivals: int = Field(default=8, ge=1, le=1000)
    """How often one request continues after a death before it ends with an error."""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """How long a shutdown waits for running requests."""
    enable_cors: bool = False
    """Send CORS headers, so that browsers may call from other origins."""
    cors_origins: Origins = ()
    """Origins that `server.enable_cors` allows; `localhost`: any of this machine; empty: all."""
    allowed_hosts: Strings = ()
    """Accepted `Host` headers besides the bound address and loopback."""
    memory_budget_mb: Megabytes | None = None
    """Memory of all models in MiB; beyond it the least recently used model is unloaded."""
    idle_unload_s: Annotated[
        float | None,
        Flag("Unload a model that idles this long.", "--idle-unload-s --sleep-idle-seconds"),
    ] = Field(default=None, gt=0, le=10**9)
    """Unload a model after this time without a request; the next request loads it again."""
    ui: Annotated[bool, Flag("Serve the web page at /.", "--ui/--no-ui --webui/--no-webui")] = True
    """Serve the web page at `/`; if keys are set, the page asks its user for one."""
    dialects: Dialects = (
        *("llamacpp", "vllm", "sglang", "ollama", "azure", "kserve", "huggingface"),
    )
    """APIs of other servers that are served besides our own; an empty list serves none of them."""
    accept_any_model: bool = False
    """Let the only model answer requests for models that are not served, with a warning."""
    max_logprobs: int = Field(default=20, ge=-1, le=2**20)
    """Max number of alternatives per token that a request may ask for; -1: the vocabulary."""
    root_path: str = Field(default="", pattern=r"^(/[A-Za-z0-9._~-]{1,64}){0,8}$")
    """Prefix of all paths behind a proxy, such as `/llm`; paths without it are served too."""
    strict: Annotated[bool, Flag("Refuse what would be emulated or clamped, with 400.")] = False
    """Refuse a parameter that would be emulated or clamped, instead of warning."""
    moderation_model: str | None = Field(default=None, min_length=1, max_length=256)
    """Chat model of this server that rates texts; unset, `/v1/moderations` is refused."""

    @property
    def tls_files(self) -> tuple[Path, Path] | None:
        """The certificate and its key, if the server speaks HTTPS."""
        cert, key = self.tls_cert_file, self.tls_key_file
        return None if cert is None or key is None else (cert, key)

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """The web origins whose pages may call the server; empty when CORS is off."""
        return (self.cors_origins or ("*",)) if self.enable_cors else ()


class ModelSettings(Section):
    model_path: str = Field(default="smollm2-135m-instruct", min_length=1, max_length=4096)
    """Model to serve: a catalogue name, a file or a directory."""
    name: Annotated[
        str | None, Flag("Model id that clients use.", "--name --served-model-name --alias -a")
    ] = Field(default=None, min_length=1, max_length=256)
    """Model id that clients use; unset, it follows from `model.model_path`."""
    draft_model: Annotated[
        str | None,
        Flag(
            "Small model with the same vocabulary that guesses tokens, which MODEL verifies.",
            "--draft-model --model-draft -md --speculative-model --speculative-draft-model-path",
            is_model=True,
        ),
    ] = Field(default=None, min_length=1, max_length=4096)
    """Small model with the same vocabulary that guesses tokens for it (see speculation.md)."""
    backend: Name = "auto"
    """Backend that runs the model, such as `native`, `torch`, `jax` or `vllm`."""
    options: Annotated[
        dict[str, Any], BeforeValidator(parse_options), AfterValidator(check_options)
    ] = {}
    """Fields of the configuration class of a backend other than our own."""
    adapters: Annotated[
        dict[str, str], BeforeValidator(parse_options), AfterValidator(check_adapters)
    ] = {}
    """LoRA adapters: the path of each, by the model id that clients use for it."""
    adapter_directory: Path | None = None
    """Folder whose adapters clients may load without an administrator's key, beside the stores."""
    device: str = Field(default="auto", pattern=r"^[a-z]+(:[0-9]{1,3}(-[0-9]{1,3})?)?$")
    """Device that computes, such as `cpu`, `cuda:1` or `cuda:0-3`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of activations and of weights that are not quantized."""
    quantization: Annotated[
        Literal["auto", "fp8", "int8"],
        Flag("Weights as fp8 or int8, on a GPU; auto: as they are stored.", "--quantization -q"),
    ] = "auto"
    """Quantize weights at load, on a GPU; `auto` keeps the stored type."""
    max_sequence_length: Annotated[
        int | None,
        Flag(
            "Context in tokens; default: the model's.",
            "--max-sequence-length --max-model-len --context-length --ctx-size -c",
        ),
    ] = Field(default=None, ge=16, le=2**24)
    """Context in tokens; unset, it is the model's own."""


class CacheSettings(Section):
    enabled: Annotated[
        bool,
        Flag(
            "Share common prefixes.",
            "--cache/--no-cache --enable-prefix-caching/--no-enable-prefix-caching",
        ),
    ] = True
    """Share common prefixes between requests through the radix tree."""
    max_size_mb: Megabytes | None = None
    """Max MiB of the KV pool that finished prefixes keep; unset, as much as later prompts use."""
    max_sequences: int = Field(default=1000, ge=1, le=10**7)
    """Max distinct cached sequences."""
    eviction_policy: Policy = "lru"
    """Order in which cached blocks are evicted."""
    warm_file: Path | None = None
    """File of prompts that are prefilled into the cache when the model is ready."""
    ttl_seconds: float | None = Field(default=None, gt=0, le=10**9)
    """Age at which an unused cached prefix expires; unset, never."""
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "int8", "fp8"],
        Flag(
            "Keys and values as auto, float32, bfloat16, int8 (CPU) or fp8 (GPU).",
            "--kv-dtype --kv-cache-dtype",
        ),
    ] = "auto"
    """Type of cached keys and values; int8 only on a CPU, fp8 only on a GPU."""
    block_size: Annotated[int, AfterValidator(check_power_of_two)] = Field(default=16, ge=1, le=256)
    """Tokens per KV block; a power of two."""


class PerformanceSettings(Section):
    batch_size: Annotated[
        int | None,
        Flag(
            "Most sequences computed in one step.",
            "--batch-size --max-num-seqs --max-running-requests --parallel -np",
        ),
    ] = Field(default=None, ge=1, le=4096)
    """Max sequences in one step; unset, it is chosen for the device."""
    max_batch_tokens: Annotated[
        int | None,
        Flag("Most tokens computed in one step.", "--max-batch-tokens --max-num-batched-tokens"),
    ] = Field(default=None, ge=1, le=2**20)
    """Max tokens in one step; at least `performance.batch_size`; unset, chosen for the device."""
    max_queued_requests: int = Field(default=8192, ge=1, le=10**6)
    """Max sequences that wait in an engine; requests beyond are refused."""
    memory_pool_size_mb: Annotated[
        Megabytes | None, Flag("KV cache in MiB; default: planned from free memory.")
    ] = None
    """Size of the KV pool in MiB; unset, it is planned from free memory."""
    gpu_memory_utilization: Annotated[
        float,
        Flag(
            "Share of the GPU's free memory to use; default: 0.9.",
            "--gpu-memory-utilization --mem-fraction-static",
        ),
    ] = Field(default=0.9, gt=0, le=1)
    """Share of the GPU memory that is free at the start, for weights and KV pool."""
    tensor_parallel_size: Annotated[
        int,
        Flag(
            "Ranks that share each layer: one GPU each, or a process on CPUs.",
            "--tensor-parallel-size -tp --tp-size --tp",
        ),
    ] = Field(default=1, ge=1, le=1024)
    """Ranks that share each layer, one GPU or CPU process each; needs the torch backend."""
    pipeline_parallel_size: Annotated[
        int,
        Flag("Stages that the layers are divided into.", "--pipeline-parallel-size -pp --pp-size"),
    ] = Field(default=1, ge=1, le=1024)
    """Stages that the layers are divided into, each with `tensor_parallel_size` ranks."""
    use_mmap: bool = True
    """Map model files instead of reading them into memory."""
    threads: Annotated[int | None, Flag("CPU threads for the model.", "--threads -t")] = Field(
        default=None, ge=1, le=1024
    )
    """CPU threads of the model; unset, the framework chooses."""
    attention: Name = "auto"
    """Attention kernel, by the name that the framework's registry has for it."""
    numerics: Annotated[
        Literal["auto", "invariant", "fast"],
        Flag(
            "invariant: answers never depend on other requests; fast: they may; auto: invariant"
            " on the native backend."
        ),
    ] = "auto"
    """`invariant`: rounding never depends on the batch; `fast`: it may; `auto`: see numerics.md."""
    speculation: Literal["auto", "on", "off"] = "auto"
    """Guess tokens and verify several in one step. `auto`: only if the output can't change."""
    max_adapters: int = Field(default=8, ge=0, le=256)
    """Max LoRA adapters in one step; others wait. 0: no adapters are served."""
    max_adapter_rank: int = Field(default=256, ge=1, le=4096)
    """Max rank of a LoRA adapter."""
    adapter_memory_mb: Megabytes = 1024
    """Host memory for LoRA adapters in MiB; the least recently used are read again when needed."""
    affinity: Annotated[str, Flag("CPUs to bind the native threads to: auto, off or 0-3,8.")] = (
        Field(
            default="auto",
            pattern=r"^(auto|off|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)$",
            max_length=256,
        )
    )
    """CPUs that native kernel threads are bound to: `auto`, `off` or a list such as `0-3,8`."""

    @model_validator(mode="after")
    def _every_sequence_gets_a_token(self) -> "PerformanceSettings":
        if (self.max_batch_tokens or 2**20) < (self.batch_size or 1):
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least"
                f" batch_size ({self.batch_size}): each sequence needs a token in every step"
            )
        return self


class LoggingSettings(Section):
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        BeforeValidator(lowercase),
        Flag("debug, info, warning or error.", "--log-level"),
    ] = "info"
    """Lowest level that is logged."""
    format: Annotated[Literal["pretty", "json"], Flag("pretty or json.", "--log-format")] = "pretty"
    """Log for a terminal, or one JSON object per line."""
    log_requests: bool = True
    """Log one line per request, without its text."""
    slow_request_s: float = Field(default=30.0, gt=0, le=86400)
    """A request slower than this logs its queue, prefill and decode times."""


class MetricsSettings(Section):
    enabled: Annotated[bool, Flag("Serve Prometheus metrics.", "--metrics/--no-metrics")] = True
    """Serve Prometheus metrics."""
    endpoint: str = Field(default="/metrics", pattern=r"^(/[A-Za-z0-9_-]+)+$", max_length=128)
    """Path of the metrics."""
    token: Secret | None = None
    """Bearer token that reads metrics and nothing else; from a variable or `metrics.token_file`."""
    token_file: Path | None = None
    """File that holds the metrics token."""

    @field_validator("endpoint")
    @classmethod
    def _check_not_reserved(cls, value: str) -> str:
        for path in RESERVED_PATHS:
            if value == path or value.startswith(path + "/"):
                raise ValueError(f"must not be below {path}, which the API uses")
        return value


class TracingSettings(Section):
    enabled: bool = False
    """Send traces and `gen_ai.server.*` metrics by OTLP; needs the extra `otel`."""
    endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s]+$", max_length=2048)
    """URL of the OTLP receiver; unset, `OTEL_EXPORTER_OTLP_ENDPOINT`, else this machine."""
    protocol: Literal["http/protobuf", "grpc"] | None = None
    """Protocol of OTLP; unset, `OTEL_EXPORTER_OTLP_PROTOCOL`, else `http/protobuf`."""
    sample_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of requests to trace if the client does not decide; unset, `OTEL_TRACES_SAMPLER`."""
    slow_s: float | None = Field(default=None, ge=0, le=86400)
    """Send only traces of requests that took longer than this, or failed; unset, all."""
    capture_content: bool = False
    """Put prompts and answers into traces."""


class LimitsSettings(Section):
    """Limits of each API key. The keys file can set other limits for a key. None means no limit."""

    requests_per_minute: int | None = Field(default=None, ge=1, le=10**9)
    """Max requests per minute."""
    tokens_per_minute: int | None = Field(default=None, ge=1, le=10**12)
    """Max tokens of prompts and answers per minute."""
    max_concurrent: int | None = Field(default=None, ge=1, le=65536)
    """Max requests at once."""
    max_queued: int | None = Field(default=None, ge=1, le=65536)
    """Max requests that have no first token yet."""
    max_queued_tokens: int | None = Field(default=None, ge=1, le=10**12)
    """Max prompt tokens of requests that have no first token yet."""
    auth_failures_per_minute: int = Field(default=120, ge=1, le=10**6)
    """Wrong keys per minute from one address before the answer is 429."""
    redis_url: Secret | None = None
    """Redis that several servers share their counts in; unset, counts stay in memory."""
    redis_url_file: Path | None = None
    """File that holds `limits.redis_url`."""


class NamedTables(msgspec.Struct, frozen=True):
    """The named tables of the TOML file, validated by `config_tables`: `[backends.NAME]`,
    `[models.ID]`, `[plugins.NAME]`, `[presets.ID]` and `[adapters.NAME]`.
    """

    backends: "Mapping[str, BackendTable]" = MappingProxyType({})
    models: "Mapping[str, ModelTable]" = MappingProxyType({})
    plugins: "Mapping[str, PluginTable]" = MappingProxyType({})
    presets: "Mapping[str, PresetTable]" = MappingProxyType({})
    adapters: "Mapping[str, AdapterTable]" = MappingProxyType({})


TABLES = NamedTables.__struct_fields__
NO_TABLES = NamedTables()


class Settings(BaseModel):
    """The whole configuration. `Settings()` has the defaults; `load_settings` reads all sources."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    tiers: TierSettings = TierSettings()
    performance: PerformanceSettings = PerformanceSettings()
    shards: ShardSettings = ShardSettings()
    nodes: NodeSettings = NodeSettings()
    logging: LoggingSettings = LoggingSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()
    limits: LimitsSettings = LimitsSettings()
    storage: StorageSettings = StorageSettings()
    requests: RequestsSettings = RequestsSettings()
    finetuning: FinetuningSettings = FinetuningSettings()
    interp: InterpSettings = InterpSettings()
    tables: Annotated[NamedTables, WithJsonSchema({})] = Field(
        default_factory=lambda: NO_TABLES, exclude=True
    )

    @property
    def vectors_dir(self) -> Path:
        """The directory of named vectors."""
        path = self.interp.vectors_dir
        return self.storage.directory / "vectors" if path is None else path.expanduser()


SECTIONS = tuple(name for name in Settings.model_fields if name != "tables")


# Earlier names of settings, which are still read.
ALIASES = {"server.survive": "server.resume_requests"}


@functools.cache
def setting_fields() -> Mapping[str, FieldInfo]:
    """The field of every setting by its `section.key`, in the order of definition."""
    kinds: dict[str, type[Section]] = get_type_hints(Settings)
    return {
        f"{section}.{key}": field
        for section in SECTIONS
        for key, field in kinds[section].model_fields.items()
    }


def setting_keys() -> list[str]:
    """The `section.key` of every setting, in the order of definition."""
    return list(setting_fields())


@functools.cache
def setting_flags() -> Mapping[str, Flag]:
    """The flags of `engine serve` that follow from settings, by the `section.key`."""
    return {
        key: each
        for key, field in setting_fields().items()
        for each in field.metadata
        if isinstance(each, Flag)
    }


# Settings that hold a secret. They are refused on the command line, which other users of the
# machine can read, and in a TOML file, which tends to be committed. A secret comes from an
# environment variable, or from the file that its `_file` setting names, such as
# `server.api_key_file`.
SECRET_KEYS = (
    "server.api_key",
    "server.admin_key",
    "server.node_token",
    "metrics.token",
    "shards.token",
    "limits.redis_url",
    "tiers.redis_url",
)
