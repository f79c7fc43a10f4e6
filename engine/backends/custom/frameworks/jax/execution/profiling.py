"""Profiles the calls of a JAX runner with XLA's profiler. It measures kernels on a GPU, and XLA
operations on a CPU.
"""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from engine.backends.custom.frameworks.jax.execution.runner import JAXRunner
from engine.backends.custom.runtime.model_runner import KernelTime


class JAXProfiler:
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
