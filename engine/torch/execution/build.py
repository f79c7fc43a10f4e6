"""Finds PyTorch devices, builds model runners and text encoders with loaded weights, and profiles
runners.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.architectures.base import ModelConfig
from engine.core.errors import ConfigError
from engine.core.shards.layout import ShardLayout
from engine.ipc.options import EngineOptions
from engine.runners.refusals import (
    check_config,
    check_dtype,
    check_numerics,
)
from engine.runtime.insight.profiler import KernelTime, Profiler
from engine.runtime.model_runner import (
    DeviceInfo,
    ImageEncoder,
    ModelRunner,
    RunnerConfig,
)
from engine.torch.device import describe
from engine.torch.execution.cuda_runner import CudaRunner
from engine.torch.execution.encoder import TorchEncoder
from engine.torch.execution.runner import TorchRunner
from engine.torch.invariance import check_invariant
from engine.torch.kernels.fp8 import cache_slot_bytes, has_fp8
from engine.torch.layers.invariant_linear import make_invariant
from engine.torch.layers.linear import can_pack, pack_linears
from engine.torch.models.loading import (
    build_encoder_model,
    build_model,
    build_vision_model,
)
from engine.torch.models.quantized_loading import placed_bytes
from engine.torch.models.vision import TorchImageEncoder
from engine.weights.model import ModelSource
from engine.worker.encoder_loop import Encoder
from engine.worker.memory import (
    DTYPE_BYTES,
    MemoryNeeds,
    cpu_device,
    dense_needs,
    on_gpu,
    with_windows,
)

if TYPE_CHECKING:
    from engine.torch.execution.distributed.collectives import Ranks
    from engine.torch.execution.distributed.model_shard import ModelShard

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SPAN = "engine: "  # in a trace, names of runner calls have this prefix; names of kernels do not
_US = 1e-6


def find_device(device: str, dtype: str) -> DeviceInfo:
    """Resolves device "auto" to CUDA if there is a GPU, else to the CPU. Resolves dtype "auto" to
    bfloat16 on CUDA and to float32 on the CPU.

    On a CPU, bfloat16 is about twice as fast as float32 for many tokens. It is not the default on
    CPUs, because its rounding changes the output of small models.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch_device(device)
    if found.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(found)
        name = "bfloat16" if dtype == "auto" else dtype
        return DeviceInfo(device, name, free_bytes, title=describe(found))
    name = "float32" if dtype == "auto" else dtype
    return cpu_device(device, name, copies_tied_head=can_pack(torch_dtype(name), found))


def memory_needs(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> MemoryNeeds:
    """The memory that a model needs, in bytes: for all weights, and for the keys and values of one
    token. If the model is cut, it is the memory of the rank that needs most.
    """
    if options.num_ranks == 1:
        return _needs(source, options, device)
    # Few engines have several ranks.
    from engine.torch.execution.distributed.model_shard import (
        largest_shards,
    )

    layout = ShardLayout(options.tensor_parallel_size, options.pipeline_parallel_size)
    each = []
    for shard in largest_shards(source, layout, torch_device(device.name)):
        cut = replace(source, config=shard.config, weights=shard.weights(source.weights))
        weight_bytes = DTYPE_BYTES[device.dtype] * sum(
            prod(weight.spec.shape) for weight in cut.weights.values()
        )
        if device.name.startswith("cuda"):
            weight_bytes = _placed_bytes(cut, options, device)
        each.append(replace(_needs(cut, options, device), weight_bytes=weight_bytes))
    needs = replace(
        max(each, key=lambda one: one.weight_bytes),
        token_bytes=max(one.token_bytes for one in each),
    )
    # The stages of a pipeline may have different kinds of layers, so all layers share a pool.
    return needs if layout.pipeline == 1 else replace(needs, window=None, window_token_bytes=0)


def _needs(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> MemoryNeeds:
    needs = dense_needs(source.config, device)
    if options.kv_dtype == "fp8":
        needs = replace(needs, token_bytes=_fp8_token_bytes(source.config))
    needs = with_windows(needs, source.config, options.max_batch_tokens)
    if not device.name.startswith("cuda"):
        return needs
    if source.quantization is not None or options.quantization != "auto":
        needs = replace(needs, weight_bytes=_placed_bytes(source, options, device))
    return on_gpu(needs, source.config, options, device)


def _placed_bytes(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> int:
    shrinks = options.quantization != "auto"
    weight_bytes = placed_bytes(source.weights, DTYPE_BYTES[device.dtype], shrinks)
    if shrinks and source.config.tie_embeddings:  # the LM head is a quantized copy
        weight_bytes += source.config.vocab_size * source.config.hidden_size
    return weight_bytes


def _fp8_token_bytes(config: ModelConfig) -> int:
    vectors = config.kv_parts * config.num_kv_heads
    return len(config.attention_layers) * cache_slot_bytes(vectors, config.head_dim)


def _check_fp8_cache(config: ModelConfig, device: torch.device) -> None:
    if not has_fp8(device):
        raise ConfigError(
            "kv_dtype fp8 needs a GPU with float8 tensor cores of NVIDIA (Ada, Hopper or later); "
            "leave it out"
        )
    if config.latent is not None:
        raise ConfigError(
            f"kv_dtype fp8 does not cover models of the family '{config.family}': one scale would "
            "serve the latent and the rotated key of a token; leave it out"
        )


def build_runner(source: ModelSource, config: RunnerConfig) -> ModelRunner:
    """Loads the weights and allocates the KV cache. Returns a runner that is ready to use."""
    if config.tensor_parallel * config.pipeline_parallel == 1:
        return local_runner(source, config)
    # Few engines have several ranks.
    from engine.torch.execution.distributed.sharded_runner import (
        open_group,
    )

    return open_group(source, config)


def local_runner(
    source: ModelSource, config: RunnerConfig, cut: "tuple[ModelShard, Ranks] | None" = None
) -> TorchRunner:
    """A runner in this process. `cut` is given in a rank: its shard of the model, and its
    connection to the other ranks.
    """
    device, dtype = torch_device(config.device), torch_dtype(config.dtype)
    invariant = config.numerics == "invariant"
    if config.kv_dtype == "fp8":
        _check_fp8_cache(source.config, device)
    if invariant:
        check_invariant(source, config, device)
    own = replace(
        config,
        kv_dtype="auto" if config.kv_dtype == "fp8" else config.kv_dtype,
        numerics="auto" if invariant else config.numerics,
    )
    check_config("torch", "PyTorch", source.config, own)
    if config.quantization != "auto" and device.type != "cuda":
        raise ConfigError(f"quantization {config.quantization} needs a GPU; leave it out on a CPU")
    if config.quantization != "auto" and source.config.experts is not None:
        raise ConfigError(
            f"quantization {config.quantization} does not cover experts; leave it out for "
            f"'{source.config.family}'"
        )
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    arguments = (config.max_seq_len, device, dtype, config.quantization)
    if cut is None:
        model = build_model(source.config, source.weights, *arguments)
    else:
        shard, ranks = cut
        prepare = partial(shard.prepare, dtype=dtype, ranks=ranks)
        model = build_model(shard.config, shard.weights(source.weights), *arguments, prepare)
    if can_pack(dtype, device):
        pack_linears(model)
    if invariant:
        make_invariant(model)
    if cut is not None:
        shard.connect(model, ranks)
    # The stages of a pipeline exchange activations, which graphs do not cover.
    has_stages = cut is not None and shard.layout.pipeline > 1
    if device.type == "cuda" and config.attention in ("auto", "triton") and not has_stages:
        return CudaRunner(model, config, device, dtype)
    return TorchRunner(model, config, device, dtype)


def profiler(runner: ModelRunner, source: ModelSource, config: RunnerConfig) -> Profiler:
    """A profiler for the calls of this runner."""
    return TorchProfiler(torch.device(config.device))


def build_encoder(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> Encoder:
    check_numerics("torch", options.numerics)
    return load_encoder(source, device.name, device.dtype, options.threads)


def load_encoder(
    source: ModelSource, device: str, dtype: str, num_threads: int | None = None
) -> Encoder:
    """Loads the weights of a text encoder. Returns an encoder that is ready to use."""
    found = find_device(device, dtype)
    place, kind = torch.device(found.name), DTYPES[found.dtype]
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    model = build_encoder_model(source.config, source.weights, place, kind)
    if can_pack(kind, place):
        pack_linears(model)
    return TorchEncoder(model, place)


def build_image_encoder(source: ModelSource, config: RunnerConfig) -> ImageEncoder:
    """Loads the weights of the image encoder of a model that reads images."""
    assert source.config.vision is not None, source.path
    device, dtype = torch_device(config.device), torch_dtype(config.dtype)
    model = build_vision_model(source.config.vision, source.vision_weights, device, dtype)
    if can_pack(dtype, device):
        pack_linears(model)
    return TorchImageEncoder(model, device)


def torch_dtype(name: str) -> torch.dtype:
    check_dtype(name, DTYPES)
    return DTYPES[name]


def torch_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device '{name}' is unknown; use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{name}' is not supported; use cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"device '{name}' is not there: PyTorch sees {count} GPUs; use cpu")
    return device


class TorchProfiler:
    """Profiles the calls of a runner with PyTorch's profiler. It measures kernels on a GPU, and
    PyTorch operations on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)

    @contextmanager
    def barrier(self, name: str) -> Iterator[None]:
        yield
        self._synchronize()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with record_function(SPAN + name):
            yield

    def __enter__(self) -> "TorchProfiler":
        self._profile.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._synchronize()
        self._profile.stop()

    def kernels(self) -> list[KernelTime]:
        on_gpu = self._device.type == "cuda"
        wanted = "CUDA" if on_gpu else "CPU"
        found = [
            KernelTime(
                event.key,
                event.count,
                _US * (event.self_device_time_total if on_gpu else event.self_cpu_time_total),
            )
            for event in self._profile.key_averages()
            if event.device_type.name == wanted and not event.key.startswith(SPAN)
        ]
        return sorted((each for each in found if each.seconds), key=lambda each: -each.seconds)

    def write_trace(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
