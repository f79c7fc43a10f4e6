"""The options that an engine gets when it starts. The frontend sends them to the engine process as
a message.
"""

import hashlib
from typing import Literal

import msgspec

from engine import __version__
from engine.core.interfaces.handover import Role

# The kinds of image encoders (`VisionConfig.kind`) that each framework runs.
# The frameworks whose runners take taps (`runtime/interp`).
TAPPED = ("native", "torch", "jax")
IMAGE_ENCODERS: dict[str, tuple[str, ...]] = {
    "native": ("idefics3", "gemma3"),
    "torch": ("idefics3", "gemma3", "qwen2_5_vl"),
}


MIB = 2**20
GIB = 2**30
# (free memory of a GPU, sequences per step, tokens per step) that `planned` chooses for PyTorch.
GPU_STEPS = ((64 * GIB, 1024, 8192), (20 * GIB, 512, 4096), (0, 128, 2048))
CPU_STEP_TOKENS = 2048
# The part of the native KV pool that is used before cached prefixes are evicted, unless settings
# give a size. The pool may be much larger, but blocks that were never used take no memory. The part
# grows if prompts need prefixes that were evicted.
KV_TARGET_BYTES = 224 * MIB


class TierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers of the prefix cache. A tier is used if it has a size."""

    host_bytes: int = 0
    host_policy: Literal["lru", "lfu", "fifo"] = "lru"
    host_ttl_s: float | None = None
    disk_path: str = ""
    disk_bytes: int = 0
    disk_policy: Literal["lru", "lfu", "fifo"] = "lru"
    disk_ttl_s: float | None = None
    redis_url: str = ""
    redis_bytes: int = 0
    redis_policy: Literal["lru", "lfu", "fifo"] = "lru"
    redis_ttl_s: float | None = None


class PeerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that serves blocks of prompts to others, or fetches them there."""

    role: Role
    # HOST:PORT at which a prefill engine serves blocks; empty: where its node joins a server from.
    listen: str = ""
    host: str = ""  # by which others reach it; empty: the address from which its node joined
    cert_file: str = ""  # with `key_file`: blocks are served by TLS
    key_file: str = ""
    kept_bytes: int = 0  # memory for blocks that others may fetch


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, tag="options"):
    """Which model to load, and how much of the machine to use. If `pool_bytes` or `max_seq_len` is
    None, the engine chooses the size by the free memory and by the model.
    """

    model_path: str
    framework: str
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "auto"
    max_seq_len: int | None = None
    use_mmap: bool = True
    threads: int | None = None
    attention: str = "auto"
    numerics: str = "auto"
    affinity: str = "auto"
    kv_dtype: str = "auto"
    speculation: Literal["auto", "on", "off"] = "auto"
    draft_model: str = ""  # the path of the draft model; "": none
    max_slots: int = 64  # 0: `planned` chooses it, and so for `max_batch_tokens`
    max_batch_tokens: int = 2048
    max_queued: int = 1024
    max_revivals: int = 8  # how often a request continues in a new engine after a death; 0: never
    pool_bytes: int | None = None
    num_oom_kills: int = 0  # earlier engines that were killed for lack of memory
    # The engine may use this share of the GPU memory that is free when it starts.
    gpu_memory_utilization: float = 0.9
    # Fine-tuning jobs train on this GPU, so an engine on it leaves memory free; "": on none.
    training_device: str = ""
    training_bytes: int | None = None  # how much; None: as much as the model's training needs
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    remote_ranks: int = 0  # ranks that join from other machines, at the address `shard_listen`
    shard_listen: str = ""
    shard_token: str = ""
    block_size: int = 16
    cache_enabled: bool = True
    cache_bytes: int | None = None
    cache_max_sequences: int | None = None
    cache_ttl_s: float | None = None
    eviction_policy: Literal["lru", "lfu", "fifo"] = "lru"
    tiers: TierOptions | None = None
    peers: PeerOptions | None = None  # None: the engine computes its prompts itself
    adapters: dict[str, str] = {}  # paths of LoRA adapters, by the name that clients use
    max_adapters: int = 8  # LoRA adapters on the device at the same time; 0: none are served
    max_adapter_rank: int = 256
    adapter_bytes: int = GIB  # host memory for LoRA adapters
    log_level: str = "warning"
    log_format: str = "pretty"

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def kv_target_bytes(self) -> int | None:
        """The bytes of the KV pool beyond which cached prefixes are evicted, at first. None: the
        whole pool is used.
        """
        has_size = self.pool_bytes is not None or self.cache_bytes is not None
        return None if self.framework != "native" or has_size else KV_TARGET_BYTES

    def fingerprint(self, files: str, device: str, dtype: str, max_seq_len: int) -> str:
        """Equal for engines in which a request has the same result. `files` identifies the model's
        files.
        """
        arithmetic = (self.framework, self.quantization, self.attention, self.numerics)
        kind = device.partition(":")[0]  # GPUs of one machine count as equal
        facts = (
            *(__version__, files, arithmetic, self.kv_dtype, kind, dtype, max_seq_len),
            *(self.tensor_parallel_size, self.pipeline_parallel_size),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def planned(self, device: str, free_bytes: int, num_cpus: int) -> "EngineOptions":
        """These options, with the sizes that the settings leave to the engine. They depend on the
        device: its kind, its free memory and the number of CPUs. Sizes of the KV cache are those of
        one rank.
        """
        if self.framework == "torch" and device.startswith("cuda"):
            _, slots, tokens = next(each for each in GPU_STEPS if free_bytes >= each[0])
        else:
            slots, tokens = min(256, max(64, 16 * num_cpus)), CPU_STEP_TOKENS
        if self.max_slots:
            tokens = max(tokens, self.max_slots)
        elif self.max_batch_tokens:
            slots = min(slots, self.max_batch_tokens)
        cache_bytes, pool_bytes = self.cache_bytes, self.pool_bytes
        return msgspec.structs.replace(
            self,
            max_slots=self.max_slots or slots,
            max_batch_tokens=self.max_batch_tokens or tokens,
            cache_bytes=None if cache_bytes is None else cache_bytes // self.num_ranks,
            pool_bytes=None if pool_bytes is None else pool_bytes // self.num_ranks,
        )
