"""Loads a model's weights into a runner, within the memory plan."""

import logging
from dataclasses import fields, replace
from math import prod

import msgspec

from engine.core.errors import ConfigError, ResourceError
from engine.core.memory import MIB, memory_room
from engine.ipc.options import IMAGE_ENCODERS, EngineOptions
from engine.runners.entry import framework_entry
from engine.runtime.model_runner import DeviceInfo, ModelRunner, RunnerConfig
from engine.runtime.requests.images import (
    MAX_CACHED_BYTES,
    MAX_HELD_BYTES,
    ImageStore,
)
from engine.weights.model import ModelSource
from engine.worker.encoder_loop import Encoder
from engine.worker.memory import (
    DTYPE_BYTES,
    MemoryNeeds,
    MemoryPlan,
    check_room,
    plan_memory,
    rank_share,
)
from engine.worker.reservations import reservation

log = logging.getLogger(__name__)

MAX_PIXELS = 16 * 2**20  # of an image that a frontend sends
ENCODER_FRAMEWORKS = ("native", "torch")


def load_encoder(source: ModelSource, options: EngineOptions) -> tuple[Encoder, DeviceInfo]:
    """Load a text encoder."""
    if options.framework not in ENCODER_FRAMEWORKS:
        raise ConfigError(
            f"{source.path.name} is a text encoder, which --backend {options.framework} does not "
            f"run; use --backend {' or --backend '.join(ENCODER_FRAMEWORKS)}"
        )
    framework = framework_entry(options.framework)
    device = framework.find_device(options.device, options.dtype)
    needs = framework.memory_needs(source, options, device)
    check_room(replace(needs, token_bytes=0), device)  # its small cache is a part of the workspace
    return framework.build_encoder(source, options, device), device


def load_runner(
    source: ModelSource, options: EngineOptions, spared_bytes: int = 0
) -> tuple[ModelRunner, RunnerConfig, MemoryPlan]:
    """Plan the memory, of which `spared_bytes` are left for others, then load the weights. The plan
    is logged. The log says which sizes were reduced to fit the memory.
    """
    if options.num_ranks > 1 and options.framework != "torch":
        by_name = "; JAX takes devices instead, as in --device cuda:0-3"
        raise ConfigError(
            "tensor_parallel_size and pipeline_parallel_size need --backend torch"
            f"{by_name if options.framework == 'jax' else ''}"
        )
    if 0 < options.num_ranks <= options.remote_ranks:
        raise ConfigError(
            f"shards.remote_ranks {options.remote_ranks} leaves none of the {options.num_ranks} "
            "ranks on this machine; lower it, or raise tensor_parallel_size"
        )
    framework = framework_entry(options.framework)
    device = rank_share(
        framework.find_device(options.device, options.dtype),
        options.num_ranks - options.remote_ranks,
    )
    needs = framework.memory_needs(source, options, device)
    if _reads_images(source, options):
        value_bytes = 4 if options.framework == "native" else DTYPE_BYTES[device.dtype]
        num_values = sum(prod(each.spec.shape) for each in source.vision_weights.values())
        needs = replace(
            needs,
            weight_bytes=needs.weight_bytes + num_values * value_bytes,
            workspace_bytes=needs.workspace_bytes + _encoder_bytes(source, options.framework),
        )
    spared_bytes += _host_bytes(options, device)
    device = replace(device, free_bytes=max(0, device.free_bytes - spared_bytes))
    plan = _planned(source, options, device, needs)
    log_plan(device, plan, options.num_ranks)
    config = runner_config(options, device, plan)
    return framework.build_runner(source, config), config, plan


def _planned(
    source: ModelSource, options: EngineOptions, device: DeviceInfo, needs: MemoryNeeds
) -> MemoryPlan:
    """The plan, beside those of other engines inside the same limit."""
    longest = source.config.max_position
    if device.name.startswith("cuda"):
        return plan_memory(longest, options, device, needs)
    with reservation() as reserved:
        if reserved.others:
            log.warning("%s", reserved.note)
            left = max(0, device.free_bytes - reserved.others)
            bound = ", ".join(each for each in (device.bound, reserved.note) if each)
            device = replace(device, free_bytes=left, bound=bound)
        plan = plan_memory(longest, options, device, needs)
        reserved.planned = (
            plan.weight_bytes + plan.pool_bytes + plan.state_bytes + needs.workspace_bytes
        )
    return plan


def load_images(
    source: ModelSource,
    options: EngineOptions,
    loaded: tuple[ModelRunner, RunnerConfig, MemoryPlan],
) -> ImageStore | None:
    """Load the image encoder of a model that reads images. None if the model has none, or if the
    framework can't run it; then the model reads only text.
    """
    vision = source.config.vision
    if vision is None or not _reads_images(source, options):
        return None
    encoder = framework_entry(options.framework).build_image_encoder(source, loaded[1])
    _, config, plan = loaded
    spare_bytes = memory_room().plannable if config.device.startswith("cuda") else plan.spare_bytes
    return ImageStore(
        encoder,
        two_way_tokens=vision.two_way_tokens,
        grid_unit=vision.grid_unit,
        max_bytes=min(MAX_CACHED_BYTES, spare_bytes // 4),
        max_held_bytes=min(MAX_HELD_BYTES, spare_bytes // 2),
        embed_bytes=4 * vision.output_size,
    )


def _encoder_bytes(source: ModelSource, framework: str) -> int:
    """Bytes of the activations while an image, or a tile of it, is encoded."""
    vision = source.config.vision
    assert vision is not None, source.path
    pixels = vision.processing.max_pixels or vision.image_size**2
    patches = min(pixels, MAX_PIXELS) // vision.patch_size**2
    num_floats = patches * (6 * vision.hidden_size + 2 * vision.intermediate_size)
    if framework == "native":  # it computes the scores of a head at once
        num_floats += 3 * patches**2
    return 4 * num_floats


def _host_bytes(options: EngineOptions, device: DeviceInfo) -> int:
    """The bytes of the device's memory that copies of blocks outside the KV pool may take. Copies
    on the host do not count on a GPU, but must fit the host.
    """
    tiers, peers = options.tiers, options.peers
    copies = (tiers.host_bytes if tiers else 0) + (peers.kept_bytes if peers else 0)
    if not device.name.startswith("cuda"):
        return copies
    room = memory_room()
    if copies > room.plannable:
        raise ResourceError(
            f"copies of cache blocks may take {copies / MIB:,.0f} MiB of the host's memory, of "
            f"which {room.plannable / MIB:,.0f} MiB are free"
            f"{f' ({room.bound})' if room.bound else ''}; lower tiers.host_mb or "
            "nodes.block_memory_mb"
        )
    return 0


def _reads_images(source: ModelSource, options: EngineOptions) -> bool:
    vision = source.config.vision
    return vision is not None and vision.kind in IMAGE_ENCODERS.get(options.framework, ())


def log_plan(device: DeviceInfo, plan: MemoryPlan, num_ranks: int = 1) -> None:
    title = f"{device.name} ({device.title})" if device.title else device.name
    ranks = [f"{num_ranks} ranks, each of which has:"] if num_ranks > 1 else []
    for line in (f"{title}, {device.dtype}", *ranks, *plan.lines()):
        log.info("memory plan: %s", line)
    for note in plan.notes:
        log.warning("memory plan: %s", note)


def runner_config(options: EngineOptions, device: DeviceInfo, plan: MemoryPlan) -> RunnerConfig:
    """The config of a runner: from the engine options of the same names, the device and the memory
    plan.
    """
    names = {field.name for field in fields(RunnerConfig)}
    given = {name: each for name, each in msgspec.structs.asdict(options).items() if name in names}
    given |= {
        "device": device.name,
        "dtype": device.dtype,
        "num_blocks": plan.num_blocks,
        "num_window_blocks": plan.num_window_blocks,
        "num_checkpoints": plan.num_checkpoints,
        "max_slots": plan.max_slots,
        "max_seq_len": plan.max_seq_len,
        "num_threads": options.threads,
        "tensor_parallel": options.tensor_parallel_size,
        "pipeline_parallel": options.pipeline_parallel_size,
    }
    return RunnerConfig(**given)
