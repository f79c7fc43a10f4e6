"""Builds the native model runner: loads the weights and passes the plans to the C++ executor."""

import functools
import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import ModelConfig
from engine.core.errors import ConfigError
from engine.core.memory import MIB
from engine.ipc.options import EngineOptions
from engine.ir.choice import matmul_kernel
from engine.ir.graph import Graph
from engine.ir.models.decoder import build_graph
from engine.ir.plan import (
    PANEL_ROWS,
    Capacity,
    ExecutionPlan,
    LinearStep,
    Machine,
    Precision,
)
from engine.ir.planner import plan_cache
from engine.ir.recurrent import empty_states
from engine.ir.reference import alibi_slopes
from engine.ir.steps import step_label
from engine.native.compiled import kernels
from engine.native.execution.allocation import kv_token_bytes, set_memory
from engine.native.execution.program import Numbered, add_program
from engine.native.execution.runner import NativeRunner
from engine.native.execution.sites import add_sites
from engine.runtime.insight.profiler import Profiler
from engine.runtime.model_runner import (
    MAX_SCORED,
    DeviceInfo,
    ImageEncoder,
    ModelRunner,
    RunnerConfig,
    RunnerSpec,
)
from engine.weights.model import ModelSource
from engine.weights.weight import Weight
from engine.worker.encoder_loop import Encoder
from engine.worker.memory import (
    MemoryNeeds,
    cpu_device,
    with_windows,
)

if TYPE_CHECKING:
    from engine.adapters.matrices import Adapter
    from engine.native.execution.adapter_packing import NativeAdapter

log = logging.getLogger(__name__)

STORED = "stored"  # a dtype: weights keep their type in the file, which decides the arithmetic
TOKENS, POSITIONS = "embed.weight", "position.weight"  # tables of token and position embeddings
TILE_TOKENS = 16  # positions per tile of the paged KV cache
# Prefill beside decode: the min number of tokens, and the number that kernels compute at a time. A
# bfloat16 kernel dequantizes all weights in each step, which takes as long as some 30 tokens. On
# CPUs without such kernels, computing many tokens together saves nothing.
BF16_TOKENS, BF16_TILE = 48, 16
ROW_TOKENS = 12
STEP_TOKENS = 512  # max tokens per step; activations of larger steps do not fit the L2 cache
INTERPRETER_BYTES = 64 * MIB  # what Python and its libraries grow by after the plan
# The KV pool's share of the free memory. Pages that no sequence has used are not committed.
POOL_SHARE = 0.25
# Packed weights of models smaller than this are not cached on disk. Packing them takes less time
# than opening a cache file.
MIN_CACHED_BYTES = 32 * MIB
# The index of each name is its code in csrc/base/layout.h.
LAYOUTS = ("Q4", "Q4G16", "Q8", "Q8M", "Q8G16", "F16", "BF16", "F32")


def find_device(device: str, dtype: str) -> DeviceInfo:
    if device not in ("auto", "cpu"):
        raise ConfigError(f"the native backend runs on the CPU; --device {device} needs another")
    if dtype not in ("auto", "float32"):
        raise ConfigError(
            f"the native backend takes weights as they are stored; --dtype {dtype} needs "
            "--backend torch, and --dtype float32 means float arithmetic throughout"
        )
    kernels()
    return cpu_device("cpu", STORED if dtype == "auto" else dtype)


def memory_needs(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> MemoryNeeds:
    weight_bytes = sum(_packed_bytes(weight) for weight in source.weights.values())
    if options.numerics == "fast" and device.dtype == STORED:
        weight_bytes += _per_channel_bytes(source)
    kv_type = _kv_type(source.config, options.kv_dtype, device.dtype, options.numerics)
    needs = MemoryNeeds(
        weight_bytes,
        kv_token_bytes(source.config, kv_type),
        workspace_bytes=_workspace_bytes(source.config, options),
        pool_share=POOL_SHARE,
        slot_bytes=4 * source.config.state_floats,
    )
    return with_windows(needs, source.config, min(options.max_batch_tokens, STEP_TOKENS))


def _workspace_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """Bytes of the activations of the largest step, of its logits, and of the interpreter."""
    inner = 3 * config.intermediate_size + 8 * config.hidden_size
    if config.experts is not None:  # each token has a row for each of its experts
        inner += config.experts.per_token * (config.experts.size + config.hidden_size)
    max_tokens = min(options.max_batch_tokens, STEP_TOKENS)
    max_logits = min(options.max_slots + _max_scored(config), max_tokens)
    return INTERPRETER_BYTES + 4 * (max_tokens * inner + max_logits * config.vocab_size)


def _max_scored(config: ModelConfig) -> int:
    """How many prompt tokens of a step may get logprobs."""
    vision = config.vision
    return max(MAX_SCORED, 0 if vision is None else vision.two_way_tokens)


def _packed_bytes(weight: Weight) -> int:
    """Bytes of a weight after packing for the kernels. This may be more than its bytes in the
    file.
    """
    native, shape = kernels(), weight.spec.shape
    if len(shape) - weight.spec.of_experts == 1:
        return 4 * prod(shape)
    *experts, rows, columns = shape
    panels = prod(experts) * -(-rows // PANEL_ROWS)
    bytes_of_panel: int = native.panel_bytes(native.layout_of(weight.kernel_dtype), columns)
    return panels * bytes_of_panel


def _per_channel_bytes(source: ModelSource) -> int:
    """Bytes of the per-channel int8 copies of weights that `--numerics fast` needs. 0 if this CPU
    has no kernels for them.
    """
    native = kernels()
    if not native.has_per_channel(native.instruction_sets()[-1]):
        return 0
    tables = (POSITIONS,) if source.config.tie_embeddings else (POSITIONS, TOKENS)
    total = 0
    for name, weight in source.weights.items():
        if len(weight.spec.shape) != 2 or weight.spec.of_experts or name in tables:
            continue
        rows, columns = weight.spec.shape
        layout = LAYOUTS[native.layout_of(weight.kernel_dtype)]
        if matmul_kernel(layout, Machine(threads=1), Precision()).decode == "int8":
            total += -(-rows // PANEL_ROWS) * native.per_channel_panel_bytes(columns)
    return total


def build_runner(source: ModelSource, config: RunnerConfig) -> NativeRunner:
    """Loads the weights, passes them and the plans to the C++ executor, and allocates the KV
    cache.
    """
    from engine.native.machine import default_threads

    _check(source.config, config)
    machine = machine_with(config.num_threads or default_threads())
    plans = plans_for(source, config, machine)
    caches = source.config.cache_places(config.num_window_blocks > 0)
    model = load_model(source, plans, caches, config.numerics, config.affinity)
    set_memory(model.native, source, config, plans[-1])
    for plan in plans:
        add_program(model.native, plan, model.weights)
    sites = add_sites(model.native, source.config, plans[0])
    rounding = "fast" if config.numerics == "fast" else "invariant"
    spec = RunnerSpec.of(
        config,
        source.config.vocab_size,
        depth=0,
        max_step_tokens=STEP_TOKENS,
        min_prompt_tokens=BF16_TOKENS if machine.has_bf16 else ROW_TOKENS,
        prompt_grain=BF16_TILE if machine.has_bf16 else ROW_TOKENS,
        has_state=source.config.state is not None,
        window=source.config.window,
        verifies_drafts=True,
        # With fast numerics, the rounding of a token depends on the number of tokens in the step.
        has_exact_drafts=rounding == "invariant",
    )
    kinds = [step_label(step) for step in plans[0].steps]
    kv_type = plans[0].precision.kv_type
    numerics = f"{machine.instruction_set} {config.dtype} {kv_type} {rounding}"
    rows_of = {name: weight.spec.shape[0] for name, weight in source.weights.items()}
    return NativeRunner(
        model.native,
        spec,
        source.config.hidden_size,
        kinds,
        numerics,
        functools.partial(_pack_adapter, plans[0], rows_of),
        source.config,
        sites,
    )


def _pack_adapter(
    plan: ExecutionPlan, rows_of: Mapping[str, int], adapter: "Adapter"
) -> "NativeAdapter":
    from engine.native.execution.adapter_packing import pack_adapter, sites_of

    return pack_adapter(sites_of(plan, rows_of), adapter)


# For each layer: the number of its KV cache, and its index among the layers of that cache.
CachePlaces = tuple[tuple[int, int], ...]


class LoadedModel(msgspec.Struct, frozen=True):
    """A model of the compiled module with its weights, but without memory and programs."""

    native: Any
    weights: Numbered


def load_model(
    source: ModelSource,
    plans: Sequence[ExecutionPlan],
    caches: CachePlaces,
    numerics: str,
    affinity: str,
) -> LoadedModel:
    """Loads the weights that the plans need and passes them to the C++ executor."""
    from engine.native.machine import place_threads
    from engine.native.weights.cache import PackedCache
    from engine.native.weights.loading import load_weights
    from engine.native.weights.progress import PackingProgress

    plan, machine = plans[0], plans[0].machine
    packed = load_weights(
        source,
        plan.matrices,
        plan.vectors,
        threads=machine.threads,
        cache=PackedCache() if source.size_bytes >= MIN_CACHED_BYTES else None,
        progress=PackingProgress(source.path.name),
    )
    places = place_threads(affinity, machine.threads)
    model = kernels().Model(machine.instruction_set, machine.threads, places.cpus, places.nodes)
    names = {matrix.name: matrix for matrix in plan.matrices}
    matrices = {
        name: model.add_matrix(panels.layout, names[name].rows, panels.columns, panels.data)
        for name, panels in packed.matrices.items()
    }
    weights = Numbered(
        matrices=matrices,
        vectors={
            name: model.add_vector(_flat(name, each)) for name, each in packed.vectors.items()
        },
        biases={name: model.add_vector(each) for name, each in packed.biases.items()},
        caches=caches,
        slopes=_add_slopes(model, source.config),
        state_offsets=_state_offsets(source.config),
        per_channel=_add_per_channel(model, plan, matrices) if numerics == "fast" else {},
    )
    model.set_fast(numerics == "fast")
    layouts = ", ".join(sorted({matrix.layout for matrix in plan.matrices}))
    isa = machine.instruction_set
    log.info("native: %s kernels on %d threads, layouts %s", isa, machine.threads, layouts)
    return LoadedModel(model, weights)


def build_encoder(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> Encoder:
    from engine.native.execution.encoder import load_encoder

    return load_encoder(source, options, device)


def _flat(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values of a weight in the order in which kernels read them. Convolutions are read token
    by token, so their matrix is transposed.
    """
    is_conv = name.endswith(".mixer.conv.weight")
    return np.ascontiguousarray(values.T if is_conv else values).reshape(-1)


def _state_offsets(config: ModelConfig) -> tuple[int, ...]:
    ends = accumulate(each.shape[1] for each in empty_states(config, 0))
    return (0, *ends)


def build_image_encoder(source: ModelSource, config: RunnerConfig) -> ImageEncoder:
    """Loads the weights of the image encoder of a model that reads images."""
    from engine.native.execution.vision import NativeImageEncoder

    assert source.config.vision is not None, source.path
    return NativeImageEncoder(source.config.vision, source.vision_weights)


def _add_slopes(model: Any, config: ModelConfig) -> int:
    if config.alibi_bias is None:
        return -1
    number: int = model.add_vector(alibi_slopes(config.num_heads, config.alibi_bias))
    return number


def _add_per_channel(
    model: Any, plan: ExecutionPlan, matrices: Mapping[str, int]
) -> dict[str, int]:
    """Adds a copy of each int8 matmul's matrix, requantized to per-channel int8, to the executor.
    Returns the number of each copy by matrix name; empty if this CPU has no kernels for them.
    """
    if not kernels().has_per_channel(plan.machine.instruction_set):
        return {}
    matmuls = (step for step in plan.steps if isinstance(step, LinearStep))
    names = dict.fromkeys(step.matrix for step in matmuls if step.kernel.decode == "int8")
    return dict(zip(names, model.add_per_channel([matrices[name] for name in names]), strict=True))


def check_settings(attention: str, quantization: str) -> None:
    if attention != "auto":
        raise ConfigError(
            f"the native backend has one kind of attention; performance.attention "
            f"{attention} needs --backend torch"
        )
    if quantization != "auto":
        raise ConfigError(
            "the native backend computes with weights as they are stored; "
            f"quantization {quantization} needs --backend torch on a GPU"
        )


def _check(model: ModelConfig, config: RunnerConfig) -> None:
    check_settings(config.attention, config.quantization)
    if config.block_size % TILE_TOKENS:
        raise ConfigError(
            f"the native backend keeps tokens in tiles of {TILE_TOKENS}: cache.block_size "
            f"{config.block_size} must be a multiple of it"
        )
    if model.learned_positions and config.max_seq_len > model.max_position:
        raise ConfigError(
            f"max_seq_len {config.max_seq_len} is beyond the model's {model.max_position} "
            "learned positions; lower it"
        )


def profiler(runner: ModelRunner, source: ModelSource, config: RunnerConfig) -> Profiler:
    """A profiler that measures the time of each plan step."""
    from engine.native.execution.profiling import NativeProfiler
    from engine.native.machine import default_threads

    assert isinstance(runner, NativeRunner), runner
    plan = plans_for(source, config, machine_with(config.num_threads or default_threads()))[0]
    return NativeProfiler(runner, [step_label(step) for step in plan.steps])


def machine_with(threads: int) -> Machine:
    """The capabilities of this CPU when `threads` threads compute, for the planner."""
    native = kernels()
    instruction_set = native.instruction_sets()[-1]
    return Machine(threads, instruction_set, native.has_bf16(instruction_set))


def plans_for(source: ModelSource, config: RunnerConfig, machine: Machine) -> list[ExecutionPlan]:
    """The execution plans of a model, one for each class of step sizes. They differ only in the
    sizes of buffers and in how work is split among threads.
    """
    max_tokens = max(config.max_batch_tokens, config.max_slots)
    return make_plans(
        build_graph(source.config),
        source,
        machine,
        Capacity(max_tokens, min(max_tokens, config.max_slots + _max_scored(source.config))),
        Precision(
            config.dtype == "float32",
            _kv_type(source.config, config.kv_dtype, config.dtype, config.numerics),
        ),
    )


def make_plans(
    graph: Graph, source: ModelSource, machine: Machine, largest: Capacity, precision: Precision
) -> list[ExecutionPlan]:
    layout_of = kernels().layout_of
    cache = plan_cache(
        graph,
        machine,
        largest.tokens,
        largest.logits,
        lambda name: LAYOUTS[layout_of(source.weights[name].kernel_dtype)],
        precision,
    )
    return [cache.get(each.tokens, each.logits) for each in cache.capacities()]


def _kv_type(config: ModelConfig, asked: str, dtype: str, numerics: str) -> str:
    if asked == "fp8":
        raise ConfigError("kv_dtype fp8 needs --backend torch on a GPU; use int8 on a CPU")
    if asked == "int8" and config.latent is not None:
        raise ConfigError(
            f"cache.kv_dtype int8 does not cover models of the family '{config.family}': one scale "
            "would serve the latent and the rotated key of a token; use bfloat16"
        )
    if asked != "auto":
        return asked
    if dtype == "float32":
        return "float32"
    native = kernels()
    is_fast = numerics == "fast" and config.latent is None
    is_int8 = is_fast and native.prefers_int8_cache(native.instruction_sets()[-1])
    return "int8" if is_int8 else "bfloat16"
