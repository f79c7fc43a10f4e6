"""The JAX framework's entry. Importing it does not import JAX; its functions do."""

from dataclasses import replace

from engine.backends.custom.options import EngineOptions
from engine.backends.custom.runtime.model_runner import (
    DeviceInfo,
    ModelRunner,
    Profiler,
    RunnerConfig,
)
from engine.backends.custom.weights.model import ModelSource
from engine.backends.custom.worker.memory import USUAL_POOL_BYTES, MemoryNeeds, dense_needs, on_gpu


def find_device(device: str, dtype: str) -> DeviceInfo:
    """Where a model would run, and as what type."""
    from engine.backends.custom.frameworks.jax.execution import build

    return build.find_device(device, dtype)


def memory_needs(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> MemoryNeeds:
    """What the weights and a token's keys and values take."""
    needs = dense_needs(source.config, device)
    if not device.name.startswith("cuda"):
        return replace(needs, usual_pool_bytes=USUAL_POOL_BYTES)
    return on_gpu(needs, source.config, options, device)


def build_runner(source: ModelSource, config: RunnerConfig) -> ModelRunner:
    """Load the model's weights and allocate its cache; programs are compiled when first used."""
    from engine.backends.custom.frameworks.jax.execution import build

    return build.build_runner(source, config)


def profiler(runner: ModelRunner, source: ModelSource, config: RunnerConfig) -> Profiler:
    """What XLA's profiler sees of a runner's calls."""
    from engine.backends.custom.frameworks.jax.execution.profiling import JAXProfiler
    from engine.backends.custom.frameworks.jax.execution.runner import JAXRunner

    assert isinstance(runner, JAXRunner), runner
    return JAXProfiler(runner)
