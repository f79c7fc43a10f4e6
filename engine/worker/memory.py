"""Divides the memory between weights and KV pool, before the model is loaded. This also limits the
batch size and the context length.

If memory is short, the KV pool is reduced first, then the batch size, then the context length. Each
reduction is logged. If not even a short context fits, loading is refused with a message that
suggests what would fit.
"""

from dataclasses import dataclass, replace

from engine.architectures.base import ModelConfig
from engine.core.errors import ResourceError
from engine.core.memory import MIB, memory_room
from engine.ipc.options import EngineOptions
from engine.runtime.groups.windows import min_window_blocks
from engine.runtime.model_runner import DeviceInfo
from engine.worker.training_memory import room_for_training

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Default size of the KV pool, as a share of the memory that the weights leave free.
POOL_SHARE = 0.5
# Memory for activations, logits and the Python interpreter.
WORKSPACE_BYTES = 256 * MIB
# Default KV pool size for frameworks that write the whole pool at startup. It is enough for tens of
# conversations with a small model.
USUAL_POOL_BYTES = 512 * MIB
# The usual KV pool has sliding windows for this many sequences, besides one full context.
USUAL_WINDOWS = 8
MAX_GRAPH_TOKENS = 4096  # CUDA graphs have memory of their own, for steps of up to this size
MIN_CONTEXT = 128
MIN_TOKENS_PER_SLOT = 128
# Checkpoints of states: how many there are per sequence of the batch, if they take at most this
# share of the memory that weights and states leave free.
CHECKPOINTS_PER_SLOT = 4
CHECKPOINT_SHARE = 0.25


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
    bytes_per_token: int  # in all layers
    notes: tuple[str, ...]
    # Blocks of the layers with a sliding window, including the null block. 0: these layers use the
    # same blocks as all others.
    num_window_blocks: int = 0
    block_size: int = 16
    state_bytes: int = 0  # memory for states and checkpoints, in models whose layers keep states
    num_checkpoints: int = 0  # copies of states that the prefix cache may keep
    spare_bytes: int = 0  # what the plan leaves free, beside the workspace

    def lines(self) -> list[str]:
        """The plan as lines of text for the log, without the notes, which are warnings."""
        tokens = (self.num_blocks - 1) * self.block_size
        windowed = ""
        if self.num_window_blocks:
            windowed_tokens = (self.num_window_blocks - 1) * self.block_size
            windowed = f", of which {windowed_tokens:,} at a time in layers with a sliding window"
        states = f"states of sequences {self.state_bytes / MIB:,.0f} MiB"
        return [
            f"weights {self.weight_bytes / MIB:,.0f} MiB",
            f"KV cache {self.pool_bytes / MIB:,.0f} MiB: {self.num_blocks - 1:,} blocks, "
            f"{tokens:,} tokens at {self.bytes_per_token:,} bytes{windowed}",
            *([states] if self.state_bytes else []),
            f"batch {self.max_slots} sequences, context {self.max_seq_len:,} tokens",
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
    # The largest sliding window, if the framework keeps the layers with windows in a block pool of
    # their own. None: all layers share one pool.
    window: int | None = None
    window_token_bytes: int = 0  # the part of `token_bytes` in layers with a sliding window
    max_step_tokens: int = 0  # max tokens of a sequence per step; 0 without a window
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


def cpu_device(name: str, dtype: str, *, copies_tied_head: bool = False) -> DeviceInfo:
    """The CPU, with the memory that this process may use."""
    room = memory_room()
    return DeviceInfo(name, dtype, room.plannable, copies_tied_head, bound=room.bound)


def rank_share(device: DeviceInfo, num_ranks: int) -> DeviceInfo:
    """The device as one of several ranks sees it. Ranks on CPUs share the machine's memory; on GPUs
    each rank has its own.
    """
    if num_ranks == 1 or device.name.startswith("cuda"):
        return device
    return replace(device, free_bytes=device.free_bytes // num_ranks)


def on_gpu(
    needs: MemoryNeeds, config: ModelConfig, options: EngineOptions, device: DeviceInfo
) -> MemoryNeeds:
    """The memory needs of a model on a GPU. The engine may use a share of the GPU's free memory
    (`gpu_memory_utilization`). Weights, the activations of the largest step and of the largest CUDA
    graph, the retained logits, and fine-tuning jobs on this GPU take a part of this share. The KV
    pool gets the rest.
    """
    value_bytes = DTYPE_BYTES[device.dtype]
    inner = 3 * config.intermediate_size + 8 * config.hidden_size
    if config.experts is not None:  # each token has a row for each of its experts
        inner += config.experts.per_token * (config.experts.size + config.hidden_size)
    graph_tokens = min(options.max_batch_tokens, MAX_GRAPH_TOKENS)
    step = (options.max_batch_tokens + graph_tokens) * inner * value_bytes
    logits = 20 * options.max_slots * config.vocab_size * value_bytes
    spared = int((1 - options.gpu_memory_utilization) * device.free_bytes)
    room = device.free_bytes - spared - needs.weight_bytes
    spared += room_for_training(config, options, device.name, room)
    return replace(needs, workspace_bytes=spared + WORKSPACE_BYTES + step + logits, pool_share=1.0)


def with_windows(needs: MemoryNeeds, config: ModelConfig, max_step_tokens: int) -> MemoryNeeds:
    """The memory needs of a framework that frees the blocks of layers with a sliding window."""
    if config.window is None:
        return needs
    num_windowed = sum(cache == 1 for cache, _ in config.cache_places(has_window_group=True))
    return replace(
        needs,
        window=config.window,
        window_token_bytes=needs.token_bytes * num_windowed // config.num_layers,
        max_step_tokens=max_step_tokens,
    )


@dataclass(frozen=True, slots=True)
class _Pools:
    """How the bytes of the KV cache are divided between two block pools: that of layers with a
    sliding window, and that of all others.
    """

    needs: MemoryNeeds
    block_size: int
    max_seq_len: int

    @property
    def has_windows(self) -> bool:
        return self.needs.window is not None and self.needs.window < self.max_seq_len

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return self.needs.token_bytes * self.block_size

    @property
    def window_bytes(self) -> int:
        """Bytes of a block in the layers with a sliding window."""
        return self.needs.window_token_bytes * self.block_size

    def bytes_for(self, num_contexts: int, num_sequences: int) -> int:
        """Bytes of the pools for this many contexts of the max length, with the null blocks, and
        for the windows of `num_sequences` sequences.
        """
        num_blocks = num_contexts * self._blocks(self.max_seq_len) + 1
        num_windowed = self._windowed(num_sequences) if self.has_windows else 0
        return self.bytes_of(num_blocks, min(num_blocks, num_windowed))

    def bytes_of(self, num_blocks: int, num_windowed: int) -> int:
        if not num_windowed:
            return num_blocks * self.block_bytes
        full_bytes = self.block_bytes - self.window_bytes
        return num_blocks * full_bytes + num_windowed * self.window_bytes

    def split(self, pool_bytes: int, max_slots: int) -> tuple[int, int]:
        """The numbers of blocks of both pools. The second is 0 if a pool for windows would save no
        memory. Then all layers share the first pool.
        """
        together = pool_bytes // self.block_bytes
        if not self.has_windows or together < self._windowed(1):
            return together, 0
        full_bytes = self.block_bytes - self.window_bytes
        if not full_bytes:  # the ids of the other blocks are mere bookkeeping
            return max(together, max_slots * self._blocks(self.max_seq_len) + 1), together
        num_windowed = min(together, self._windowed(max_slots))
        # If not even one context fits, fewer windows are kept.
        one_context = (self._blocks(self.max_seq_len) + 1) * full_bytes
        spared = (pool_bytes - one_context) // self.window_bytes
        num_windowed = max(self._windowed(1), min(num_windowed, spared))
        num_blocks = (pool_bytes - num_windowed * self.window_bytes) // full_bytes
        return (num_blocks, num_windowed) if num_blocks > together else (together, 0)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _windowed(self, num_sequences: int) -> int:
        """Windowed blocks for this many sequences: a window for each, and one more for a cached
        prefix. Only one sequence at a time has rows of the max length.
        """
        window = self.needs.window
        assert window is not None
        max_row = min(self.needs.max_step_tokens, self.max_seq_len)
        longest = min_window_blocks(window, self.block_size, max_row)
        each = min_window_blocks(window, self.block_size, 1)
        return longest + (2 * num_sequences - 1) * each + 1


def plan_memory(
    max_position: int, options: EngineOptions, device: DeviceInfo, needs: MemoryNeeds
) -> MemoryPlan:
    """Divide the free memory of the device. `max_position` is the max context length of the model.
    Raises `ResourceError` if the memory is too small even for a short context.
    """
    weight_bytes, available_bytes = needs.weight_bytes, device.free_bytes
    notes: list[str] = []
    max_seq_len = min(options.max_seq_len or max_position, max_position)
    pools = _Pools(needs, options.block_size, max_seq_len)
    shortest = min(MIN_CONTEXT, max_seq_len)
    min_bytes = _Pools(needs, options.block_size, shortest).bytes_for(1, 1)
    room = available_bytes - weight_bytes - needs.workspace_bytes
    most_slots = _affordable_slots(options.max_slots, needs.slot_bytes, room)
    num_checkpoints = _affordable_checkpoints(most_slots, needs.slot_bytes, room)
    if needs.slot_bytes:
        room -= (most_slots + 1 + num_checkpoints) * needs.slot_bytes
    check_room(needs, device, device.free_bytes - room + min_bytes)
    if options.max_seq_len and options.max_seq_len > max_position:
        notes.append(
            f"context is {max_position:,}, the model's own: "
            f"{options.max_seq_len:,} asked for is more than it was made for"
        )
    pool_bytes = _pool_bytes(pools, options, needs, min_bytes, room, notes)
    num_blocks, num_window_blocks = pools.split(pool_bytes, options.max_slots)
    capacity = (num_blocks - 1) * options.block_size
    at_a_time = ((num_window_blocks or num_blocks) - 1) * options.block_size
    max_slots = max(1, min(most_slots, at_a_time // MIN_TOKENS_PER_SLOT))
    if max_slots < options.max_slots:
        why = f"the KV cache holds {at_a_time:,} tokens"
        if max_slots == most_slots:
            why = f"each has a state of {needs.slot_bytes / MIB:,.1f} MiB"
        notes.append(f"batch is {max_slots} instead of {options.max_slots} sequences: {why}")
    if capacity < max_seq_len:
        notes.append(
            f"context is {capacity:,} instead of {max_seq_len:,} tokens: that is the whole KV cache"
        )
        max_seq_len = capacity
    return MemoryPlan(
        weight_bytes=weight_bytes,
        pool_bytes=pools.bytes_of(num_blocks, num_window_blocks),
        num_blocks=num_blocks,
        max_slots=max_slots,
        max_seq_len=max_seq_len,
        bytes_per_token=needs.token_bytes,
        notes=tuple(notes),
        num_window_blocks=num_window_blocks,
        block_size=options.block_size,
        state_bytes=(max_slots + 1 + num_checkpoints) * needs.slot_bytes,
        num_checkpoints=num_checkpoints,
        spare_bytes=room - pool_bytes,
    )


def check_room(needs: MemoryNeeds, device: DeviceInfo, needed: int | None = None) -> None:
    """Raise `ResourceError` if a model does not fit. `needed` is all memory that it needs at least;
    None: its weights and workspace.
    """
    if needed is None:
        needed = needs.weight_bytes + needs.workspace_bytes
    if needed > device.free_bytes:
        raise ResourceError(_refusal(needs, needed, device))


def _pool_bytes(
    pools: _Pools,
    options: EngineOptions,
    needs: MemoryNeeds,
    min_bytes: int,
    room: int,
    notes: list[str],
) -> int:
    """Bytes of the block pools: those that were asked for, or as much as sequences can use. Each
    engine that was killed for lack of memory halves it. After the first, a whole context still fits
    if that takes at most three quarters of the pool, so that all open requests can continue.
    """
    pool_bytes = _wanted_pool(pools, options, needs, min_bytes, room, notes)
    if not options.num_oom_kills:
        return pool_bytes
    smaller = max(min_bytes, pool_bytes >> options.num_oom_kills)
    if options.num_oom_kills == 1:
        smaller = max(smaller, min(pool_bytes * 3 // 4, pools.bytes_for(1, 1)))
    notes.append(
        f"KV cache is {smaller / MIB:,.0f} MiB instead of {pool_bytes / MIB:,.0f} MiB: the engine "
        f"was killed for lack of memory ({options.num_oom_kills} times)"
    )
    return smaller


def _wanted_pool(
    pools: _Pools,
    options: EngineOptions,
    needs: MemoryNeeds,
    min_bytes: int,
    room: int,
    notes: list[str],
) -> int:
    if options.pool_bytes is not None:
        return _asked_pool(options.pool_bytes, min_bytes, room, notes)
    wanted = pools.bytes_for(options.max_slots, options.max_slots)
    if needs.usual_pool_bytes is not None:
        one = pools.bytes_for(1, min(USUAL_WINDOWS, options.max_slots))
        wanted = min(wanted, max(one, needs.usual_pool_bytes))
    return max(min_bytes, min(wanted, int(room * needs.pool_share)))


def _affordable_checkpoints(num_slots: int, slot_bytes: int, room: int) -> int:
    """How many copies of states the prefix cache may keep, beside the states themselves."""
    if not slot_bytes:
        return 0
    affordable = int((room - (num_slots + 1) * slot_bytes) * CHECKPOINT_SHARE) // slot_bytes
    return max(0, min(CHECKPOINTS_PER_SLOT * num_slots, affordable))


def _affordable_slots(wanted: int, slot_bytes: int, room: int) -> int:
    """The number of sequences whose states take at most half of the room, and at least 1."""
    if not slot_bytes:
        return wanted
    return max(1, min(wanted, room // 2 // slot_bytes - 1))


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


def _refusal(needs: MemoryNeeds, needed: int, device: DeviceInfo) -> str:
    available, dtype = device.free_bytes, device.dtype
    message = (
        f"the model needs {needed / MIB:,.0f} MiB as {dtype} "
        f"and {available / MIB:,.0f} MiB are free"
    )
    if device.bound:
        message += f" ({device.bound}; raise it by {(needed - available) / MIB:,.0f} MiB)"
    halved = (needed + needs.workspace_bytes) // 2
    if dtype == "float32" and halved <= available:
        return f"{message}; it would fit with --dtype bfloat16 ({halved / MIB:,.0f} MiB)"
    if dtype not in DTYPE_BYTES:
        return f"{message}; use a smaller or more strongly quantized model"
    fits = max(0, available - needs.workspace_bytes) // DTYPE_BYTES[dtype]
    return f"{message}; a model of up to {fits / 1e6:,.0f} M parameters would fit"
