"""How fast models answer on this machine: one measurement, which is kept, and one formula.

The measurement is how many bytes of weights per second the kernels read in a matmul with one token,
on all threads. Kernels are measured in a process of their own, because those of a broken build may
crash. `engine doctor` measures again; all other commands take what is kept.
"""

import hashlib
import json
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from engine.core.folders import store_directory
from engine.core.sandbox.private_files import write_private

NATIVE = "engine.native"
_MEASURE_TIMEOUT_S = 30.0
# Of the rate of the matmuls alone, what a whole step of one sequence reaches: attention, the other
# layers and the sampler take the rest.
_STEP_SHARE = 0.75


def tokens_per_second(weight_bytes: float, rate: float) -> float:
    """An estimate of the decode speed of one sequence on a CPU: every token reads the weights once.
    `rate` is that of `weight_rate`.
    """
    return float(f"{rate * _STEP_SHARE / max(1.0, weight_bytes):.3g}")


def speed_text(tokens_per_s: float) -> str:
    """Never "0": a model that is too slow to use still has a speed."""
    if tokens_per_s >= 10:
        return f"{tokens_per_s:.0f}"
    return f"{tokens_per_s:.2g}" if tokens_per_s >= 0.1 else "<0.1"


def weight_rate() -> float | None:
    """Bytes of weights per second. None if the kernels were not built, or do not run."""
    kept = _read()
    if kept is None:
        try:
            kept = measured_speed()
        except (OSError, subprocess.SubprocessError, ValueError):
            return None
    return float(kept["read_bytes_per_s"])


def has_kernels() -> bool:
    return find_spec(f"{NATIVE}._native") is not None


def measured_speed() -> dict[str, Any]:
    """Measure the native kernels, and keep the result. Raises `SubprocessError` or `ValueError` if
    the kernels can't run.
    """
    command = [sys.executable, "-m", f"{NATIVE}.machine"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_MEASURE_TIMEOUT_S)
    if answer.returncode:
        problem = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        raise ValueError(problem[-1])
    speed: dict[str, Any] = json.loads(answer.stdout)
    _keep(speed)
    return speed


def _kept_at() -> Path:
    return store_directory().parent / "speed.json"


def _identity() -> str:
    """Of what was measured: the machine, the processors that may be used, and the build."""
    spec = find_spec(f"{NATIVE}._native")
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    build = None if origin is None else (str(origin), origin.stat().st_mtime_ns)
    facts = (platform.node(), platform.machine(), psutil.cpu_count(), build)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _read() -> dict[str, Any] | None:
    try:
        kept = json.loads(_kept_at().read_text(encoding="utf-8"))
        if kept["of"] == _identity() and kept["speed"]["read_bytes_per_s"] > 0:
            return dict(kept["speed"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def _keep(speed: dict[str, Any]) -> None:
    content = json.dumps({"of": _identity(), "speed": speed}).encode()
    try:
        _kept_at().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(_kept_at(), content)
    except OSError:
        return  # the next command measures again
