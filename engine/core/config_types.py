"""Types of settings that several sections use, and the base class of the sections."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)

MAX_SECRET_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Flag:
    """Marks a setting that is also a flag of `engine serve`."""

    help: str
    # The names of the flag. The names after the first one are those of vLLM, SGLang or llama.cpp.
    # Empty: the only name is that of the setting.
    names: str = ""
    heading: str = ""  # in the help; empty: the heading of the setting's section
    metavar: str | None = None
    is_model: bool = False  # tab completion offers names of models


def _split_commas(value: Any) -> Any:
    """Split a list that a variable or a flag gives as `a,b`."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def parse_options(value: Any) -> Any:
    """Parse backend options that a variable gives in TOML syntax: `{ name = "value" }`."""
    if not isinstance(value, str):
        return value
    try:
        return tomllib.loads(f"options = {value}")["options"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f'must be written {{ name = "value" }}: {error}') from None


def check_options(value: dict[str, Any]) -> dict[str, Any]:
    if value:
        from engine.core.config_tables import refuse_secrets

        refuse_secrets(value)
    return value


def check_adapters(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not re.fullmatch(r"[!-~]{1,256}", name):
            raise ValueError("an adapter's name is 1 to 256 visible ASCII characters")
    return value


def _check_secret(value: SecretStr) -> SecretStr:
    if not re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_SECRET_LENGTH}}}", value.get_secret_value()):
        raise ValueError(
            f"must be 1 to {MAX_SECRET_LENGTH} characters of printable ASCII without spaces"
        )
    return value


def check_power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def _check_origin(value: str) -> str:
    if value not in ("*", "localhost") and not re.fullmatch(r"https?://[^/\s?#]+", value):
        raise ValueError('must be "*", "localhost" or an origin such as "https://app.example.com"')
    return value


def lowercase(value: Any) -> Any:
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
Frontends = Literal["auto"] | Annotated[int, Field(ge=1, le=32)]
Policy = Literal["lru", "lfu", "fifo"]
Dialect = Literal["llamacpp", "vllm", "sglang", "ollama", "azure", "kserve", "huggingface"]
Dialects = Annotated[tuple[Dialect, ...], BeforeValidator(_split_commas)]


class Section(BaseModel):
    """Base class of the sections. A section is one table of the TOML file, such as `[server]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` and `false` for settings that are not booleans. Python would take `true` as
        1.
        """
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError(f"must not be {str(value).lower()}")
        return value


class TierSettings(Section):
    """The tiers of the prefix cache below the KV pool, in the table `[cache.tiers]`."""

    host_mb: Megabytes | None = None
    """MiB of host memory for copies of KV blocks, useful on a GPU; unset, no such tier."""
    host_policy: Policy = "lru"
    """Order in which blocks in host memory are evicted."""
    host_ttl_s: float | None = Field(default=None, gt=0, le=10**9)
    """Seconds after its last use when a block in host memory expires; unset, never."""
    disk_path: Path | None = None
    """Folder for KV blocks on disk, which survive a restart; unset, no such tier."""
    disk_mb: Megabytes = 8192
    """Max MiB of blocks on disk."""
    disk_policy: Policy = "lru"
    """Order in which blocks on disk are evicted."""
    disk_ttl_s: float | None = Field(default=None, gt=0, le=10**9)
    """Seconds after its last use when a block on disk expires; unset, never."""
    redis_url: Secret | None = None
    """URL of a Redis or Valkey for KV blocks that several servers share; unset, no such tier."""
    redis_url_file: Path | None = None
    """File that holds `redis_url`."""
    redis_mb: Megabytes = 8192
    """Max MiB of blocks in Redis."""
    redis_policy: Policy = "lru"
    """Order in which blocks in Redis are evicted."""
    redis_ttl_s: float = Field(default=86400.0, gt=0, le=10**9)
    """Seconds after its last use when a block in Redis expires."""


class ShardSettings(Section):
    """Ranks on other machines, for `performance.tensor_parallel_size` and its like."""

    remote_ranks: int = Field(default=0, ge=0, le=1023)
    """How many of the ranks, the last ones, join from other machines by `engine shard`."""
    listen: str | None = Field(default=None, pattern=r"^[^\s]+:[0-9]{1,5}$", max_length=256)
    """HOST:PORT at which they join."""
    token: Secret | None = None
    """Token that they must have; from a variable or `shards.token_file`."""
    token_file: Path | None = None
    """File that holds the token."""


class NodeSettings(Section):
    """What an engine that works for a server does there, and how blocks get from node to node."""

    role: Annotated[
        Literal["both", "prefill", "decode"],
        Flag(
            "prefill: compute long prompts for decode nodes; decode: fetch these; both: all work."
        ),
    ] = "both"
    """`prefill`: compute prompts for decode nodes; `decode`: fetch these; `both`: all work."""
    min_prefill_tokens: int | None = Field(default=None, ge=1, le=2**24)
    """Prompts with fewer new tokens skip prefill nodes; unset, it is found by measuring."""
    block_listen: str | None = Field(default=None, pattern=r"^[^\s]+:[0-9]{1,5}$", max_length=256)
    """HOST:PORT of a prefill node's KV blocks; unset, any port of the address it joins from."""
    block_host: str | None = Field(default=None, pattern=r"^[^\s]+$", max_length=256)
    """Host by which decode nodes reach this prefill node; unset, the address that it joins from."""
    block_memory_mb: Megabytes = 512
    """Memory of a prefill node in MiB for blocks that decode nodes may fetch."""
