"""The PyTorch framework's entry. Importing it does not import PyTorch; its functions do."""

from dataclasses import replace

from engine.backends.custom.options import EngineOptions
from engine.backends.custom.runtime.model_runner import (
    DeviceInfo,
    ModelRunner,
    Profiler,
    RunnerConfig,
)
from engine.backends.custom.weights.model import ModelSource
from engine.backends.custom.worker.encoder_loop import Encoder
from engine.backends.custom.worker.memory import DTYPE_BYTES, MemoryNeeds, dense_needs, on_gpu


def find_device(device: str, dtype: str) -> DeviceInfo:
    """Where a model would run, and as what type."""
    from engine.backends.custom.frameworks.torch.execution import build

    return build.find_device(device, dtype)


def memory_needs(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> MemoryNeeds:
    """What the weights and a token's keys and values take."""
    needs = dense_needs(source.config, device)
    if not device.name.startswith("cuda"):
        return needs
    needs = on_gpu(needs, source.config, options, device)
    if source.quantization is None and options.quantization == "auto":
        return needs
    from engine.backends.custom.frameworks.torch.models.quantized_loading import placed_bytes

    value_bytes = DTYPE_BYTES[device.dtype]
    shrinks = options.quantization != "auto"
    weight_bytes = placed_bytes(source.weights, value_bytes, shrinks)
    if shrinks and source.config.tie_embeddings:  # the head is a smaller copy of the table
        weight_bytes += source.config.vocab_size * source.config.hidden_size
    return replace(needs, weight_bytes=weight_bytes)


def build_runner(source: ModelSource, config: RunnerConfig) -> ModelRunner:
    """Load the model's weights and allocate its cache; the runner is ready when this returns."""
    from engine.backends.custom.frameworks.torch.execution import build

    return build.build_runner(source, config)


def profiler(runner: ModelRunner, source: ModelSource, config: RunnerConfig) -> Profiler:
    """What PyTorch's profiler sees of a runner's calls."""
    import torch

    from engine.backends.custom.frameworks.torch.execution.profiling import TorchProfiler

    return TorchProfiler(torch.device(config.device))


def build_encoder(
    source: ModelSource, device: str, dtype: str, num_threads: int | None = None
) -> Encoder:
    """Load the weights of a text encoder; it is ready when this returns."""
    from engine.backends.custom.frameworks.torch.execution import encoder

    return encoder.build_encoder(source, device, dtype, num_threads)
