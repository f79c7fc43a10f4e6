"""The tinygrad framework's entry. Importing it does not import tinygrad; its functions do."""

from engine.backends.custom.options import EngineOptions
from engine.backends.custom.runtime.model_runner import (
    DeviceInfo,
    ModelRunner,
    Profiler,
    RunnerConfig,
)
from engine.backends.custom.weights.model import ModelSource
from engine.backends.custom.worker.memory import MemoryNeeds
from engine.core.errors import ConfigError


def find_device(device: str, dtype: str) -> DeviceInfo:
    """Where a model would run, and as what type."""
    from engine.backends.custom.frameworks.tinygrad.execution import build

    return build.find_device(device, dtype)


def memory_needs(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> MemoryNeeds:
    """What the weights and a token's keys and values take, and the largest step beside them."""
    from engine.backends.custom.frameworks.tinygrad.execution import build

    return build.memory_needs(source, options, device)


def build_runner(source: ModelSource, config: RunnerConfig) -> ModelRunner:
    """Load the model's weights and allocate its cache; steps are compiled when first used."""
    from engine.backends.custom.frameworks.tinygrad.execution import build

    return build.build_runner(source, config)


def profiler(runner: ModelRunner, source: ModelSource, config: RunnerConfig) -> Profiler:
    """tinygrad tells the time of each program itself, when it is started so."""
    raise ConfigError(
        "the tinygrad backend has no profile; start it with DEBUG=2 in the environment, and "
        "tinygrad prints every program with its time"
    )
