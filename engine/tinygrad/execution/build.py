"""Finds tinygrad devices and builds a model runner with loaded weights."""

import ctypes
import re
from dataclasses import replace

from tinygrad import Device, dtypes
from tinygrad.helpers import PARALLEL

from engine.core.errors import ConfigError
from engine.ipc.options import EngineOptions
from engine.runners.refusals import check_plain
from engine.runtime.insight.profiler import Profiler
from engine.runtime.model_runner import (
    DeviceInfo,
    ModelRunner,
    RunnerConfig,
    RunnerSpec,
)
from engine.tinygrad.clang import missing_clang
from engine.tinygrad.execution.runner import (
    TinygradRunner,
    make_cache,
    padded_size,
)
from engine.tinygrad.models.loading import load_model
from engine.weights.model import ModelSource
from engine.worker.memory import (
    USUAL_POOL_BYTES,
    MemoryNeeds,
    cpu_device,
    dense_needs,
)

NAME = re.compile(r"(cpu|metal|cuda(:\d+)?)")


def find_device(device: str, dtype: str) -> DeviceInfo:
    """Resolves device "auto" to CUDA if tinygrad finds it, else to the CPU, and dtype "auto" to
    float32, which keeps all weights exact.
    """
    if device == "auto":
        device = "cuda" if _is_there("CUDA") else "cpu"
    open_device(device)
    kind = "float32" if dtype == "auto" else dtype
    if device.startswith("cuda"):
        return DeviceInfo(device, kind, _free_cuda_bytes())
    return cpu_device(device, kind)


def open_device(device: str) -> str:
    """Checks that a device exists and works, and returns tinygrad's name for the device."""
    if NAME.fullmatch(device) is None:
        raise ConfigError(f"device '{device}' is unknown; use cpu, cuda, cuda:N or metal")
    problem = missing_clang() if device == "cpu" else None
    if problem is not None:
        raise ConfigError(problem)
    name = Device.canonicalize(device)
    if not _is_there(name):
        raise ConfigError(f"device '{device}' is not there for tinygrad; use cpu")
    return name


def _is_there(name: str) -> bool:
    """Whether tinygrad can open the device. tinygrad has no other way to ask. Each kind of device
    raises its own kind of error, so all errors are caught.
    """
    try:
        Device[name]
    except Exception:
        return False
    return True


def _free_cuda_bytes() -> int:
    """Free memory in bytes of the CUDA device that was opened last."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    if status != 0:
        raise ConfigError(f"the CUDA driver does not report its free memory (error {status})")
    return free.value


__all__ = ["build_runner", "find_device", "memory_needs", "profiler"]

DTYPES = {
    "float32": dtypes.float32,
    "bfloat16": dtypes.bfloat16,
    "float16": dtypes.float16,
}
# Max tokens per step. Larger steps are hardly faster per token, and each step size needs one more
# program to compile.
MOST_STEP_TOKENS = 128


def memory_needs(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> MemoryNeeds:
    """The memory that a model needs. It includes scratch memory for attention, which stores a score
    and a softmax weight for each token, head and position of the longest context.
    """
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
    """Loads the weights and allocates the KV cache. Steps are compiled when first used."""
    _check(source, config)
    device, dtype = open_device(config.device), DTYPES[config.dtype]
    PARALLEL.value = 0  # an engine process has no child processes
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
        max_step_tokens=MOST_STEP_TOKENS,
    )
    return TinygradRunner(model, cache, spec)


def profiler(runner: ModelRunner, source: ModelSource, config: RunnerConfig) -> Profiler:
    """Always raises `ConfigError`, because this framework has no profiler. tinygrad itself prints
    kernel times if it starts with DEBUG=2 in the environment.
    """
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
