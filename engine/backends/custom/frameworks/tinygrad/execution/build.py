"""From a model source and a configuration to a loaded runner."""

from dataclasses import replace

from tinygrad import dtypes
from tinygrad.helpers import PARALLEL

from engine.backends.custom.frameworks.refusals import check_plain
from engine.backends.custom.frameworks.tinygrad.execution.device import find_device, open_device
from engine.backends.custom.frameworks.tinygrad.execution.runner import TinygradRunner
from engine.backends.custom.frameworks.tinygrad.execution.steps import make_cache, padded_size
from engine.backends.custom.frameworks.tinygrad.models.loading import load_model
from engine.backends.custom.memory import USUAL_POOL_BYTES, MemoryNeeds, dense_needs
from engine.backends.custom.options import EngineOptions
from engine.backends.custom.runtime.profiler import Profiler
from engine.backends.custom.runtime.seam import DeviceInfo, ModelRunner, RunnerConfig, RunnerSpec
from engine.backends.custom.weights.model import ModelSource
from engine.core.errors import ConfigError

__all__ = ["build_runner", "find_device", "memory_needs", "profiler"]

DTYPES = {
    "float32": dtypes.float32,
    "bfloat16": dtypes.bfloat16,
    "float16": dtypes.float16,
}
# A larger step gains little, and every size is one more program to compile.
MOST_STEP_TOKENS = 128


def memory_needs(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> MemoryNeeds:
    """Attention keeps a score and a weight for every position that a step's tokens could see."""
    config = source.config
    needs = dense_needs(config, device)
    longest = min(options.max_seq_len or config.max_position, config.max_position)
    largest = padded_size(max(MOST_STEP_TOKENS, options.max_slots))
    scores = 2 * 4 * largest * config.num_heads * longest
    return replace(
        needs,
        usual_pool_bytes=USUAL_POOL_BYTES if device.name == "cpu" else None,
        workspace_bytes=needs.workspace_bytes + scores,
    )


def build_runner(source: ModelSource, config: RunnerConfig) -> TinygradRunner:
    """Load the model's weights and allocate its cache; steps are compiled when first used."""
    _check(source, config)
    device, dtype = open_device(config.device), DTYPES[config.dtype]
    PARALLEL.value = 0  # an engine's process has no children of its own
    model = load_model(source.config, source.weights, config.max_seq_len, dtype, device)
    cache = make_cache(
        model,
        config.num_blocks,
        config.block_size,
        config.max_seq_len,
        config.max_slots,
        dtype,
        device,
    )
    spec = RunnerSpec.of(
        config,
        source.config.vocab_size,
        depth=0,
        most_step_tokens=MOST_STEP_TOKENS,
    )
    return TinygradRunner(model, cache, spec)


def profiler(runner: ModelRunner, source: ModelSource, config: RunnerConfig) -> Profiler:
    """tinygrad tells the time of each program itself, when it is started so."""
    raise ConfigError(
        "the tinygrad backend has no profile; start it with DEBUG=2 in the environment, and "
        "tinygrad prints every program with its time"
    )


def _check(source: ModelSource, config: RunnerConfig) -> None:
    check_plain("tinygrad", "tinygrad", DTYPES, source.config, config)
    if config.attention != "auto":
        raise ConfigError(f"the tinygrad backend has one attention, not '{config.attention}'")
    if config.num_threads not in (None, 1):
        raise ConfigError("tinygrad runs its programs in one thread; leave performance.threads out")
