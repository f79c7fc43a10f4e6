"""Describes the machine of a measurement, in one line and as data."""

import os
import platform
from pathlib import Path
from typing import Any

import psutil


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "has_amx": "amx_int8" in _cpu_flags(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def machine_line(facts: dict[str, Any]) -> str:
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gb']} GB, {facts['system']}, "
        f"Python {facts['python']}"
    )


def vllm_dtype() -> str:
    """The dtype for vLLM on this CPU: on Arm without bfloat16 instructions, its worker dies in the
    first step.
    """
    is_without = platform.machine() == "aarch64" and "bf16" not in _cpu_flags()
    return "float32" if is_without else "bfloat16"


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _cpu_flags() -> set[str]:
    return {word for line in _cpu_lines() for word in line.split()}


def _cpu_name() -> str:
    named = [line for line in _cpu_lines() if line.startswith("model name")]
    names = [line.partition(":")[2].strip() for line in named]
    return names[0] if names else platform.processor() or platform.machine()
