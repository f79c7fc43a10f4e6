"""Finds JAX devices, builds a model runner with loaded weights, and profiles it."""

import gzip
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from engine.core.errors import ConfigError
from engine.core.folders import store_directory
from engine.ipc.options import EngineOptions
from engine.jax.execution.runner import JAXRunner
from engine.jax.execution.sharding import home, make_mesh, param_spec
from engine.jax.models.loading import build_model, load_params
from engine.runners.refusals import check_plain
from engine.runtime.insight.profiler import KernelTime, Profiler
from engine.runtime.model_runner import (
    DeviceInfo,
    ModelRunner,
    RunnerConfig,
)
from engine.weights.model import ModelSource
from engine.worker.memory import (
    USUAL_POOL_BYTES,
    MemoryNeeds,
    cpu_device,
    dense_needs,
    on_gpu,
    with_windows,
)

log = logging.getLogger(__name__)
# Below this level, JAX logs a message for each kind of device that the machine does not have.
logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
DEVICE = re.compile(r"(?P<platform>cpu|cuda)(?::(?P<first>\d+)(?:-(?P<last>\d+))?)?")
# Compiled programs are kept on disk if compilation took at least this many seconds.
MIN_KEPT_COMPILE_S = 0.1


def find_device(device: str, dtype: str) -> DeviceInfo:
    """Resolves device "auto" to CUDA if JAX finds a GPU, else to the CPU. Resolves dtype "auto" to
    bfloat16 on CUDA and to float32 on the CPU.
    """
    if device == "auto":
        device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    devices = _devices(device)
    if devices[0].platform == "cpu":
        return cpu_device(device, "float32" if dtype == "auto" else dtype)
    stats = [each.memory_stats() for each in devices]
    free_bytes = sum(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    return DeviceInfo(device, "bfloat16" if dtype == "auto" else dtype, free_bytes)


def memory_needs(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> MemoryNeeds:
    """The memory that a model needs, in bytes: for all weights, and for the keys and values of one
    token.
    """
    needs = dense_needs(source.config, device)
    needs = with_windows(needs, source.config, options.max_batch_tokens)
    if not device.name.startswith("cuda"):
        return replace(needs, usual_pool_bytes=USUAL_POOL_BYTES)
    return on_gpu(needs, source.config, options, device)


def build_runner(source: ModelSource, config: RunnerConfig) -> JAXRunner:
    """Loads the weights and allocates the KV cache. Programs are compiled when first used."""
    _check(source, config)
    keep_compiled(store_directory().parent / "jax")
    devices = _devices(config.device)
    mesh = make_mesh(devices, source.config)
    model = build_model(source.config, source.weights, config.max_seq_len)

    def place(name: str, value: ArrayLike) -> jax.Array:
        return jax.device_put(value, home(param_spec(name), mesh, devices[0]))

    params = load_params(source.weights, DTYPES[config.dtype], place)
    return JAXRunner(model, params, config, devices[0], mesh)


def profiler(runner: ModelRunner, source: ModelSource, config: RunnerConfig) -> Profiler:
    """A profiler for the calls of this runner."""
    assert isinstance(runner, JAXRunner), runner
    return JAXProfiler(runner)


def keep_compiled(folder: Path) -> None:
    """Lets JAX keep compiled programs in `folder` for the next start. If the folder cannot be
    created, this logs a warning, and every start compiles again.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled programs are not kept for the next start: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_KEPT_COMPILE_S)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _check(source: ModelSource, config: RunnerConfig) -> None:
    check_plain("jax", "XLA", DTYPES, source.config, config)
    if config.num_threads is not None:
        raise ConfigError(
            "XLA takes a thread for every CPU that its process may use; leave performance.threads "
            "out, and start the engine with taskset to give it fewer"
        )


def _devices(name: str) -> list[jax.Device]:
    """The devices of a name such as "cpu", "cuda" or "cuda:1". "cuda:0-3" shards the model over
    four GPUs.
    """
    match = DEVICE.fullmatch(name)
    if match is None:
        raise ConfigError(f"device '{name}' is unknown; use cpu, cuda, cuda:N or cuda:N-M")
    try:
        found = jax.devices(match["platform"])
    except RuntimeError:
        found = []
    first = int(match["first"] or 0)
    last = int(match["last"] or first)
    if not first <= last < len(found):
        raise ConfigError(
            f"device '{name}' is not there: JAX sees {len(found)} devices of that kind; use cpu"
        )
    return found[first : last + 1]


class JAXProfiler:
    """Profiles the calls of a runner with XLA's profiler. It measures kernels on a GPU, and XLA
    operations on a CPU.
    """

    def __init__(self, runner: JAXRunner) -> None:
        self._runner = runner
        self._trace = b""  # JSON in Chrome's trace format

    @contextmanager
    def barrier(self, name: str) -> Iterator[None]:
        yield
        self._runner.wait()

    def span(self, name: str) -> AbstractContextManager[None]:
        return jax.profiler.TraceAnnotation(name)

    def __enter__(self) -> "JAXProfiler":
        self._folder = TemporaryDirectory(prefix="engine-profile-")
        jax.profiler.start_trace(self._folder.name)
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.wait()
        jax.profiler.stop_trace()
        with self._folder as folder:
            (written,) = Path(folder).rglob("*.trace.json.gz")
            self._trace = gzip.decompress(written.read_bytes())

    def kernels(self) -> list[KernelTime]:
        """Times of the operations in compiled programs. XLA numbers operations of the same kind, as
        in `dot.17`. Their times are summed up under the name without the number.
        """
        seconds: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in json.loads(self._trace)["traceEvents"]:
            if "hlo_op" in event.get("args", {}) and "dur" in event:
                name = event["name"].rstrip("0123456789").rstrip(".")
                seconds[name] += event["dur"] * 1e-6
                calls[name] += 1
        return [KernelTime(name, calls[name], spent) for name, spent in seconds.most_common()]

    def write_trace(self, path: Path) -> None:
        path.write_bytes(self._trace)
