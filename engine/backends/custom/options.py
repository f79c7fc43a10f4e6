"""The options that an engine gets when it starts. The frontend sends them to the engine process as
a message.
"""

from typing import Literal

import msgspec

# The kinds of image encoders (`VisionConfig.kind`) that each framework runs.
IMAGE_ENCODERS: dict[str, tuple[str, ...]] = {
    "native": ("idefics3", "gemma3"),
    "torch": ("idefics3", "gemma3", "qwen2_5_vl"),
}


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
    numerics: str = "invariant"
    affinity: str = "auto"
    kv_dtype: str = "auto"
    max_slots: int = 64
    max_batch_tokens: int = 2048
    max_queued: int = 1024
    pool_bytes: int | None = None
    # The engine may use this share of the GPU memory that is free when it starts.
    gpu_memory_utilization: float = 0.9
    block_size: int = 16
    cache_enabled: bool = True
    cache_bytes: int | None = None
    cache_max_sequences: int | None = None
    cache_ttl_s: float | None = None
    eviction_policy: Literal["lru", "lfu", "fifo"] = "lru"
    log_level: str = "warning"
    log_format: str = "pretty"
