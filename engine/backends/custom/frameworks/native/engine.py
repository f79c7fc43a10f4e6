"""The native framework's entry. Importing it does not load the kernels; its functions do.

Models run on C++ kernels on the CPU, from weights in the form that their file stores.
"""

from engine.backends.custom.memory import MemoryNeeds
from engine.backends.custom.options import EngineOptions
from engine.backends.custom.runtime.profiler import Profiler
from engine.backends.custom.runtime.seam import DeviceInfo, ModelRunner, RunnerConfig
from engine.backends.custom.weights.model import ModelSource


def find_device(device: str, dtype: str) -> DeviceInfo:
    """Where a model would run, and as what type."""
    from engine.backends.custom.frameworks.native.execution import build

    return build.find_device(device, dtype)


def memory_needs(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> MemoryNeeds:
    """What the weights and a token's keys and values take."""
    from engine.backends.custom.frameworks.native.execution import build

    return build.memory_needs(source, options, device)


def build_runner(source: ModelSource, config: RunnerConfig) -> ModelRunner:
    """Map or repack the model's weights and allocate its cache; the runner is ready afterwards."""
    from engine.backends.custom.frameworks.native.execution import build

    return build.build_runner(source, config)


def profiler(runner: ModelRunner, source: ModelSource, config: RunnerConfig) -> Profiler:
    """Seconds of a runner's calls by the steps of its plan."""
    from engine.backends.custom.frameworks.native.execution import build
    from engine.backends.custom.frameworks.native.execution.profiling import NativeProfiler
    from engine.backends.custom.frameworks.native.execution.runner import NativeRunner
    from engine.backends.custom.frameworks.native.machine import default_threads
    from engine.backends.custom.ir.plan import step_label

    assert isinstance(runner, NativeRunner), runner
    machine = build.machine_with(config.num_threads or default_threads())
    plan = build.plans_for(source, config, machine)[0]
    return NativeProfiler(runner, [step_label(step) for step in plan.steps])
