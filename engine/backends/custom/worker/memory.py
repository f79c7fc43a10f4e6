"""Divides the memory between weights and KV pool, before the model is loaded. This also limits the
batch size and the context length.

If memory is short, the KV pool is reduced first, then the batch size, then the context length. Each
reduction is logged. If not even a short context fits, loading is refused with a message that
suggests what would fit.
"""

from dataclasses import dataclass, replace

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.options import EngineOptions
from engine.backends.custom.runtime.model_runner import DeviceInfo
from engine.core.errors import ResourceError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MIB = 1024 * 1024
# Default size of the KV pool, as a share of the memory that the weights leave free.
POOL_SHARE = 0.5
# Memory for activations, logits and the Python interpreter.
WORKSPACE_BYTES = 256 * MIB
# Default KV pool size for frameworks that write the whole pool at startup. It is enough for tens of
# conversations with a small model.
USUAL_POOL_BYTES = 512 * MIB
MIN_CONTEXT = 128
MIN_TOKENS_PER_SLOT = 128


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How memory is divided between weights and KV pool, and the resulting limits. `notes` tell the
    user which sizes were reduced.
    """

    weight_bytes: int
    pool_bytes: int
    num_blocks: int  # including the null block
    max_slots: int
    max_seq_len: int
    bytes_per_token: int
    notes: tuple[str, ...]
    state_bytes: int = 0  # memory for the states of sequences, in models whose layers keep one

    def lines(self) -> list[str]:
        """The plan as lines of text for the log."""
        block_size = self.pool_bytes // self.num_blocks // self.bytes_per_token
        tokens = (self.num_blocks - 1) * block_size
        states = f"states of sequences {self.state_bytes / MIB:,.0f} MiB"
        return [
            f"weights {self.weight_bytes / MIB:,.0f} MiB",
            f"KV cache {self.pool_bytes / MIB:,.0f} MiB: {self.num_blocks - 1:,} blocks, "
            f"{tokens:,} tokens at {self.bytes_per_token:,} bytes",
            *([states] if self.state_bytes else []),
            f"batch {self.max_slots} sequences, context {self.max_seq_len:,} tokens",
            *self.notes,
        ]


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The memory that a framework needs for a model."""

    weight_bytes: int
    token_bytes: int  # bytes of keys and values per token
    # The default size of the KV pool in bytes. None means that it depends on the free memory.
    usual_pool_bytes: int | None = None
    workspace_bytes: int = WORKSPACE_BYTES  # memory besides the weights and the KV pool
    pool_share: float = POOL_SHARE
    # Bytes of the state of one sequence, in models whose layers keep one.
    slot_bytes: int = 0


def dense_needs(config: ModelConfig, device: DeviceInfo) -> MemoryNeeds:
    """Memory needs of a framework that stores all weights, keys and values in `device.dtype`."""
    value_bytes = DTYPE_BYTES[device.dtype]
    num_values = config.num_params
    if device.copies_tied_head and config.tie_embeddings:
        num_values += config.vocab_size * config.hidden_size
    return MemoryNeeds(
        num_values * value_bytes,
        config.kv_bytes_per_token(value_bytes),
        slot_bytes=4 * config.state_floats,
    )


def on_gpu(
    needs: MemoryNeeds, config: ModelConfig, options: EngineOptions, device: DeviceInfo
) -> MemoryNeeds:
    """The memory needs of a model on a GPU. The engine may use a share of the GPU's free memory
    (`gpu_memory_utilization`). Weights, the activations of the largest step and the retained logits
    take a part of this share. The KV pool gets the rest.
    """
    value_bytes = DTYPE_BYTES[device.dtype]
    inner = 3 * config.intermediate_size + 8 * config.hidden_size
    if config.experts is not None:  # each token has a row for each of its experts
        inner += config.experts.per_token * (config.experts.size + config.hidden_size)
    step = options.max_batch_tokens * inner * value_bytes
    logits = 16 * options.max_slots * config.vocab_size * value_bytes
    spared = int((1 - options.gpu_memory_utilization) * device.free_bytes)
    return replace(needs, workspace_bytes=spared + WORKSPACE_BYTES + step + logits, pool_share=1.0)


def plan_memory(
    max_position: int, options: EngineOptions, device: DeviceInfo, needs: MemoryNeeds
) -> MemoryPlan:
    """Divide the free memory of the device. `max_position` is the max context length of the model.
    Raises `ResourceError` if the memory is too small even for a short context.
    """
    weight_bytes, token_bytes = needs.weight_bytes, needs.token_bytes
    available_bytes = device.free_bytes
    block_bytes = token_bytes * options.block_size
    notes: list[str] = []
    max_seq_len = min(options.max_seq_len or max_position, max_position)
    min_bytes = _pool_bytes(min(MIN_CONTEXT, max_seq_len), options.block_size, block_bytes)
    room = available_bytes - weight_bytes - needs.workspace_bytes
    most_slots = _affordable_slots(options.max_slots, needs.slot_bytes, room)
    room -= (most_slots + 1) * needs.slot_bytes
    if room < min_bytes:
        raise ResourceError(_refusal(weight_bytes, min_bytes, available_bytes, device.dtype))
    if options.max_seq_len and options.max_seq_len > max_position:
        notes.append(
            f"context is {max_position:,}, the model's own: "
            f"{options.max_seq_len:,} asked for is more than it was made for"
        )
    if options.pool_bytes is None:
        wanted = _pool_bytes(options.max_slots * max_seq_len, options.block_size, block_bytes)
        if needs.usual_pool_bytes is not None:
            one = _pool_bytes(max_seq_len, options.block_size, block_bytes)
            wanted = min(wanted, max(one, needs.usual_pool_bytes))
        pool_bytes = max(min_bytes, min(wanted, int(room * needs.pool_share)))
    else:
        pool_bytes = _asked_pool(options.pool_bytes, min_bytes, room, notes)
    num_blocks = pool_bytes // block_bytes
    capacity = (num_blocks - 1) * options.block_size
    max_slots = max(1, min(most_slots, capacity // MIN_TOKENS_PER_SLOT))
    if max_slots < options.max_slots and max_slots == most_slots:
        notes.append(
            f"batch is {max_slots} instead of {options.max_slots} sequences: each has a state of "
            f"{needs.slot_bytes / MIB:,.1f} MiB"
        )
    elif max_slots < options.max_slots:
        notes.append(
            f"batch is {max_slots} instead of {options.max_slots} sequences: the KV cache holds "
            f"{capacity:,} tokens"
        )
    if capacity < max_seq_len:
        notes.append(
            f"context is {capacity:,} instead of {max_seq_len:,} tokens: that is the whole KV cache"
        )
        max_seq_len = capacity
    return MemoryPlan(
        weight_bytes=weight_bytes,
        pool_bytes=num_blocks * block_bytes,
        num_blocks=num_blocks,
        max_slots=max_slots,
        max_seq_len=max_seq_len,
        bytes_per_token=token_bytes,
        notes=tuple(notes),
        state_bytes=(max_slots + 1) * needs.slot_bytes,
    )


def _affordable_slots(wanted: int, slot_bytes: int, room: int) -> int:
    """The number of sequences whose states take at most half of the room, and at least 1."""
    if not slot_bytes:
        return wanted
    return max(1, min(wanted, room // 2 // slot_bytes - 1))


def _pool_bytes(num_tokens: int, block_size: int, block_bytes: int) -> int:
    """Bytes of a KV pool for `num_tokens` tokens, including the null block."""
    return (-(-num_tokens // block_size) + 1) * block_bytes


def _asked_pool(asked: int, min_bytes: int, room: int, notes: list[str]) -> int:
    if asked < min_bytes:
        raise ResourceError(
            f"a KV cache of {asked / MIB:,.1f} MiB is too small to be of use; "
            f"give it at least {-(-min_bytes // MIB):,} MiB (performance.memory_pool_size_mb)"
        )
    if asked > room:
        notes.append(
            f"KV cache is {room / MIB:,.0f} MiB instead of {asked / MIB:,.0f} MiB: "
            "no more memory is free"
        )
    return min(asked, room)


def _refusal(weight_bytes: int, least_pool: int, available: int, dtype: str) -> str:
    needed = weight_bytes + WORKSPACE_BYTES + least_pool
    message = (
        f"the model needs {needed / MIB:,.0f} MiB as {dtype} "
        f"and {available / MIB:,.0f} MiB are free"
    )
    halved = (weight_bytes + least_pool) // 2 + WORKSPACE_BYTES
    if dtype == "float32" and halved <= available:
        return f"{message}; it would fit with --dtype bfloat16 ({halved / MIB:,.0f} MiB)"
    if dtype not in DTYPE_BYTES:
        return f"{message}; use a smaller or more strongly quantized model"
    fits = max(0, available - WORKSPACE_BYTES) // DTYPE_BYTES[dtype]
    return f"{message}; a model of up to {fits / 1e6:,.0f} M parameters would fit"
