"""Every setting there is: its section, type, bounds and default.

A key's name here is its name everywhere: `[server] port` in TOML, `LLM_ENGINE_SERVER__PORT` in the
environment, `--port` on the command line. Sizes in `_mb` are MiB. All of it is frozen: nothing
writes to settings after they are loaded.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

if TYPE_CHECKING:
    from engine.core.config_tables import BackendTable, ModelTable, PluginTable

MAX_SECRET_LENGTH = 512
RESERVED_PATHS = ("/v1", "/health", "/livez", "/readyz", "/generate")


def _split_commas(value: Any) -> Any:
    """Environment variables and flags give a list as `a,b`."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _parse_options(value: Any) -> Any:
    """An environment variable gives options as TOML has them: `{ name = "value" }`."""
    if not isinstance(value, str):
        return value
    try:
        return tomllib.loads(f"options = {value}")["options"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f'must be written {{ name = "value" }}: {error}') from None


def _check_options(value: dict[str, Any]) -> dict[str, Any]:
    if value:
        from engine.core.config_tables import refuse_secrets

        refuse_secrets(value)
    return value


def _check_secret(value: SecretStr) -> SecretStr:
    if not re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_SECRET_LENGTH}}}", value.get_secret_value()):
        raise ValueError(
            f"must be 1 to {MAX_SECRET_LENGTH} characters of printable ASCII without spaces"
        )
    return value


def _check_power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def _check_origin(value: str) -> str:
    if value != "*" and not re.fullmatch(r"https?://[^/\s?#]+", value):
        raise ValueError('must be "*" or an origin such as "https://app.example.com"')
    return value


def _lowercase(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Megabytes = Annotated[int, Field(ge=1, le=2**24)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Secret = Annotated[SecretStr, AfterValidator(_check_secret)]
Strings = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=253)], ...], BeforeValidator(_split_commas)
]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_check_origin)], ...], BeforeValidator(_split_commas)
]


class Section(BaseModel):
    """One table of the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts `true` as 1; a port of `true` is a mistake."""
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError(f"must not be {str(value).lower()}")
        return value


class ServerSettings(Section):
    host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    port: int = Field(default=8080, ge=0, le=65535)  # 0: any free port
    probe_port: int | None = Field(default=None, ge=0, le=65535)  # the probes alone, by a thread
    api_key: Secret | None = None  # from LLM_ENGINE_API_KEY or api_key_file only
    api_key_file: Path | None = None
    keys_file: Path | None = None  # several keys, named, as `engine keys` writes them
    admin_key: Secret | None = None  # for /v1/admin; from LLM_ENGINE_ADMIN_KEY or admin_key_file
    admin_key_file: Path | None = None
    insecure_no_auth: bool = False  # serve other machines without a key
    max_concurrent_requests: int = Field(default=256, ge=1, le=65536)
    body_limit_mb: int = Field(default=8, ge=1, le=1024)
    request_timeout_s: float = Field(default=600.0, gt=0, le=86400)
    queue_timeout_s: float = Field(default=60.0, gt=0, le=86400)  # for a request that can't begin
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    enable_cors: bool = False
    cors_origins: Origins = ()  # empty with enable_cors: every origin
    allowed_hosts: Strings = ()  # Host headers besides the bound address and loopback
    memory_budget_mb: Megabytes | None = None  # of all models; past it the least used is unloaded
    idle_unload_s: float | None = Field(default=None, gt=0, le=10**9)  # it loads again when asked
    strict: bool = False  # refuse what would be emulated or clamped, instead of warning

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """The origins that browsers may call from; empty when CORS is off."""
        if not self.enable_cors:
            return ()
        return self.cors_origins or ("*",)


class ModelSettings(Section):
    model_path: str = Field(  # a catalogue name, a file or a directory
        default="smollm2-135m-instruct", min_length=1, max_length=4096
    )
    name: str | None = Field(default=None, min_length=1, max_length=256)  # None: from model_path
    backend: Name = "auto"
    # Of a backend other than our own: fields of its configuration.
    options: Annotated[
        dict[str, Any], BeforeValidator(_parse_options), AfterValidator(_check_options)
    ] = {}
    device: str = Field(default="auto", pattern=r"^[a-z]+(:[0-9]{1,3}(-[0-9]{1,3})?)?$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "fp8", "int8"] = "auto"  # of weights; auto: as they are stored
    max_sequence_length: int | None = Field(default=None, ge=16, le=2**24)  # None: the model's


class CacheSettings(Section):
    enabled: bool = True
    max_size_mb: Megabytes | None = None  # what finished prefixes may keep of the pool; None: all
    max_sequences: int = Field(default=1000, ge=1, le=10**7)  # distinct cached sequences
    eviction_policy: Literal["lru", "lfu", "fifo"] = "lru"
    warm_file: Path | None = None  # prompts that are computed before anybody asks
    ttl_seconds: float | None = Field(default=None, gt=0, le=10**9)  # None: no expiry
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"  # of keys and values
    block_size: Annotated[int, AfterValidator(_check_power_of_two)] = Field(
        default=16, ge=1, le=256
    )


class PerformanceSettings(Section):
    batch_size: int = Field(default=64, ge=1, le=4096)  # sequences in one step
    max_batch_tokens: int = Field(default=2048, ge=1, le=2**20)  # tokens in one step
    max_queued_requests: int = Field(default=1024, ge=1, le=10**6)
    memory_pool_size_mb: Megabytes | None = None  # the KV pool; None: planned from free memory
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)  # of what is free at the start
    use_mmap: bool = True
    threads: int | None = Field(default=None, ge=1, le=1024)  # None: the framework's choice
    attention: Name = "auto"
    numerics: Literal["invariant", "fast"] = "invariant"  # fast: rounding may depend on batch mates
    affinity: str = Field(  # which CPUs kernel threads are bound to: "0-3,8", "off"
        default="auto", pattern=r"^(auto|off|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)$", max_length=256
    )

    @model_validator(mode="after")
    def _every_sequence_gets_a_token(self) -> "PerformanceSettings":
        if self.max_batch_tokens < self.batch_size:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least"
                f" batch_size ({self.batch_size}): each sequence needs a token in every step"
            )
        return self


class LoggingSettings(Section):
    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lowercase)] = (
        "info"
    )
    format: Literal["pretty", "json"] = "pretty"
    log_requests: bool = True
    slow_request_s: float = Field(default=30.0, gt=0, le=86400)  # slower requests log a time split


class MetricsSettings(Section):
    enabled: bool = True
    endpoint: str = Field(default="/metrics", pattern=r"^(/[A-Za-z0-9_-]+)+$", max_length=128)
    token: Secret | None = None  # read access to metrics alone; from the environment or token_file
    token_file: Path | None = None

    @field_validator("endpoint")
    @classmethod
    def _check_not_reserved(cls, value: str) -> str:
        for path in RESERVED_PATHS:
            if value == path or value.startswith(path + "/"):
                raise ValueError(f"must not be below {path}, which the API uses")
        return value


class LimitsSettings(Section):
    """What each key may ask for, unless the keys file says otherwise for it; None: no limit."""

    requests_per_minute: int | None = Field(default=None, ge=1, le=10**9)
    tokens_per_minute: int | None = Field(default=None, ge=1, le=10**12)  # prompts and answers
    max_concurrent: int | None = Field(default=None, ge=1, le=65536)
    max_queued: int | None = Field(default=None, ge=1, le=65536)  # those without a first token
    max_queued_tokens: int | None = Field(default=None, ge=1, le=10**12)  # of their prompts
    auth_failures_per_minute: int = Field(default=120, ge=1, le=10**6)  # of one address
    redis_url: Secret | None = None  # counts are shared there; None: kept in memory
    redis_url_file: Path | None = None


class StorageSettings(Section):
    """What outlives a request, and the server: stored responses, files, batches."""

    path: Path | None = None  # a directory; None: the user's data directory
    response_ttl_s: float = Field(default=30 * 86400.0, gt=0, le=10**9)
    max_responses: int = Field(default=10_000, ge=1, le=10**7)
    max_size_mb: Megabytes = 1024  # of uploaded files and batch results
    file_ttl_s: float = Field(default=30 * 86400.0, gt=0, le=10**9)

    @property
    def directory(self) -> Path:
        if self.path is not None:
            return self.path.expanduser()
        base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        return Path(base) / "engine"


class NamedTables(msgspec.Struct, frozen=True):
    """`[backends.NAME]`, `[models.ID]` and `[plugins.NAME]`, as `config_tables` has read and
    checked them.
    """

    backends: "Mapping[str, BackendTable]" = MappingProxyType({})
    models: "Mapping[str, ModelTable]" = MappingProxyType({})
    plugins: "Mapping[str, PluginTable]" = MappingProxyType({})


TABLES = NamedTables.__struct_fields__
NO_TABLES = NamedTables()


class Settings(BaseModel):
    """The whole configuration. `Settings()` is the defaults; `load_settings` reads the sources."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    performance: PerformanceSettings = PerformanceSettings()
    logging: LoggingSettings = LoggingSettings()
    metrics: MetricsSettings = MetricsSettings()
    limits: LimitsSettings = LimitsSettings()
    storage: StorageSettings = StorageSettings()
    tables: Annotated[NamedTables, WithJsonSchema({})] = Field(
        default_factory=lambda: NO_TABLES, exclude=True
    )


SECTIONS = tuple(name for name in Settings.model_fields if name != "tables")


def setting_keys() -> list[str]:
    """Every `section.key`, in order."""
    defaults = Settings()
    return [
        f"{section}.{key}"
        for section in SECTIONS
        for key in type(getattr(defaults, section)).model_fields
    ]


# Never given on a command line, where other users of the machine could read it, nor kept in a TOML
# file, which tends to be committed: each has a `_file` key beside it instead.
SECRET_KEYS = ("server.api_key", "server.admin_key", "metrics.token", "limits.redis_url")
