"""`engine doctor`: shows the machine's hardware, which backends can run on it, and what is missing.

Versions come from package metadata, GPUs from the driver, and speeds from a separate process. No ML
framework is imported, because a broken installation must not break the command that diagnoses it.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import typer

from engine import __version__
from engine.cli import machine_speed
from engine.cli.console import ConfigOption, JsonOption, load_cli_settings, output
from engine.core.errors import EngineError
from engine.core.memory import memory_room
from engine.core.store.gpus import amd_gpus, has_rocm_torch, query_gpus, rocm_version

_GIB = 2**30
_NATIVE_FIX = (
    "install a C++ compiler (for example: apt-get install g++) and install the engine again, "
    "or serve with PyTorch: pip install 'engine[torch]' and --backend torch"
)
# Backend -> the Python packages that it needs, and the extras of our package that install them
# (`pip install 'engine[EXTRA]'`).
_BACKEND_NEEDS = {
    "jax": (("jax",), "jax"),
    "tinygrad": (("tinygrad",), "tinygrad"),
    "torch": (("torch",), "torch"),
    "transformers": (("torch", "transformers"), "torch,transformers"),
}
# Backends that run outside this Python environment, where this command can't check them. The text
# says where each of them runs.
_ELSEWHERE = {
    "vllm": "runs in the environment that its option python names",
    "sglang": "runs in the environment that its option python names",
    "openai": "runs wherever its option base_url says",
    "nodes": "runs on the machines that join with engine node join",
}
_PACKAGES = (
    *("torch", "jax", "tinygrad", "transformers"),
    *("tokenizers", "numpy", "fastapi", "uvicorn"),
)
_CPU_FEATURES = {
    **{"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "AVX-512 VNNI", "avx_vnni": "AVX VNNI"},
    **{"avx512_bf16": "AVX-512 BF16", "amx_tile": "AMX", "amx_int8": "AMX INT8"},
    **{"amx_bf16": "AMX BF16", "asimd": "NEON", "asimddp": "dot product", "asimdhp": "FP16"},
    **{"sve": "SVE", "i8mm": "I8MM", "bf16": "BF16"},
}
# Kernel set -> the faster ones, and the flags in /proc/cpuinfo that each needs.
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
_FASTER: dict[str, dict[str, tuple[str, ...]]] = {
    "avx2": {"avx_vnni": ("avx_vnni",), "avx512": _AVX512},
    "avx_vnni": {"avx512": _AVX512},
    "avx512": {"avx512_bf16": ("avx512_bf16",)},
    "avx512_bf16": {"amx": ("amx_tile", "amx_bf16")},
    "neon": {"i8mm": ("i8mm",)},
    "i8mm": {"neon_bf16": ("bf16",)},
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `ok` is None if the fact is neither good nor bad. `fix` tells the
    user how to fix a problem.
    """

    topic: str
    name: str
    detail: str
    ok: bool | None = None
    fix: str | None = None


def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show what this machine can run, and why. Exits with 1 if no backend can run here."""
    gpus = _gpus()
    has_gpu = any(each.ok for each in gpus)
    kernels = _kernels()
    findings = [
        *_software(),
        *_hardware(),
        *gpus,
        *kernels,
        *_backends(has_gpu, kernels[0]),
        *_settings_and_model(config),
    ]
    if as_json:
        print(json.dumps([asdict(each) for each in findings]))
    else:
        _print_table(findings)
    if not any(each.ok for each in findings if each.topic == "backend"):
        raise typer.Exit(1)


def _software() -> list[Finding]:
    found = [
        Finding("software", "engine", __version__),
        Finding("software", "Python", f"{platform.python_version()} ({sys.executable})"),
    ]
    return found + [
        Finding("software", name, _installed_version(name) or "not installed") for name in _PACKAGES
    ]


def _hardware() -> list[Finding]:
    model, features = _cpu()
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else psutil.cpu_count()
    cores = f"{psutil.cpu_count(logical=False) or '?'} cores, {usable} usable threads"
    memory = memory_room()
    room = f"{memory.free / _GIB:.1f} GiB available of {memory.total / _GIB:.1f} GiB"
    if memory.bound:
        room += f"; {memory.bound}"
    return [
        Finding("hardware", "CPU", f"{model}, {cores}"),
        Finding("hardware", "instructions", ", ".join(features) or "none that kernels use"),
        Finding("hardware", "memory", room),
    ]


def _cpu() -> tuple[str, list[str]]:
    """The CPU's name, and those of its instruction sets that the native kernels can use."""
    flags = _cpu_flags()
    features = [name for flag, name in _CPU_FEATURES.items() if flag in flags]
    return _cpu_fields().get("model name") or platform.processor() or platform.machine(), features


def _cpu_flags() -> list[str]:
    fields = _cpu_fields()
    return (fields.get("flags") or fields.get("Features") or "").split()


def _cpu_fields() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo. Empty on systems without this file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields


def _gpus() -> list[Finding]:
    try:
        rows = query_gpus("name,memory.total,driver_version")
    except (OSError, subprocess.SubprocessError) as error:
        detail = f"nvidia-smi failed: {error}"
        return [Finding("hardware", "GPU", detail, False, "check the NVIDIA driver")]
    rows_of_amd = _amd_gpus()
    if not rows and not rows_of_amd:
        return [Finding("hardware", "GPU", "no NVIDIA or AMD driver found; models run on the CPU")]
    found = [Finding("hardware", f"GPU {index}", row, True) for index, row in enumerate(rows)]
    return found + rows_of_amd


def _amd_gpus() -> list[Finding]:
    """AMD GPUs. PyTorch uses them only if it is a ROCm build."""
    rocm = rocm_version()
    platform_text = f"ROCm {rocm}" if rocm else "ROCm not found in /opt/rocm"
    usable = has_rocm_torch()
    fix = None if usable else "install a ROCm build of PyTorch (docs/kernels.md, AMD GPUs)"
    return [
        Finding(
            "hardware",
            f"GPU {index}",
            f"{gpu.name}, {gpu.memory // 2**20} MiB, {platform_text}",
            usable or None,
            fix,
        )
        for index, gpu in enumerate(amd_gpus())
    ]


def _kernels() -> list[Finding]:
    """The instruction sets that the native kernels can use on this machine, and the measured speed
    of the kernels.
    """
    if not machine_speed.has_kernels():
        return [Finding("kernels", "native kernels", "not built", False, _NATIVE_FIX)]
    try:
        speed = machine_speed.measured_speed()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        detail = f"built, but measuring them failed: {error}"
        return [Finding("kernels", "native kernels", detail, False, _NATIVE_FIX)]
    return _speeds(speed)


def _why_not_faster(kernel_set: str, flags: Sequence[str]) -> str:
    """What the CPU lacks for the faster kernel sets. Empty if there are none."""
    if kernel_set == "generic":
        wanted = "AVX2, FMA and F16C" if platform.machine() == "x86_64" else "dot product and FP16"
        return f"; no faster kernels, because {wanted} are missing on this CPU"
    reasons = []
    for faster, needed in _FASTER.get(kernel_set, {}).items():
        missing = [_CPU_FEATURES.get(flag, flag) for flag in needed if flag not in flags]
        are = "is" if len(missing) == 1 else "are"
        reason = (
            "these kernels were built on another CPU, or the operating system does not enable its"
            " registers; in the first case, install the engine again here"
        )
        if missing:
            reason = f"{', '.join(missing)} {are} missing on this CPU"
        reasons.append(f"; not {faster}, because {reason}")
    return "".join(reasons)


def _speeds(speed: Mapping[str, Any]) -> list[Finding]:
    from engine.core.store.catalogue import CATALOGUE, DEFAULT_MODEL

    *lesser, best = speed["instruction_sets"]
    versions = f"{best}; also here: {', '.join(lesser)}" if lesser else best
    versions += _why_not_faster(best, _cpu_flags())
    threads = f"{speed['threads']}, unless performance.threads says otherwise"
    if speed["nodes"] > 1:
        threads += (
            f"; on {speed['nodes']} NUMA nodes: threads are bound to their node, each node has the "
            "weights that its threads multiply by, and the KV cache is spread over the nodes"
        )
    rates = [f"{speed['int8_ops_per_s'] / 1e12:.2f} TOPS int8"]
    if speed["bf16_ops_per_s"] is not None:
        rates.append(f"{speed['bf16_ops_per_s'] / 1e12:.2f} TFLOPS bfloat16")
    found = [
        Finding("kernels", "native kernels", versions, True),
        Finding("kernels", "threads", threads),
        Finding("kernels", "weights read", f"{speed['read_bytes_per_s'] / 1e9:.1f} GB/s"),
        Finding("kernels", "matrix products", ", ".join(rates)),
    ]
    size = CATALOGUE[DEFAULT_MODEL].size
    if size is not None:
        rate = machine_speed.tokens_per_second(size, speed["read_bytes_per_s"])
        detail = (
            f"about {machine_speed.speed_text(rate)} tok/s for one request, more where"
            f" speculation guesses right or the CPU's caches hold its {size / 1e6:.0f} MB"
        )
        found.append(Finding("kernels", DEFAULT_MODEL, detail))
    return found


def _backends(has_gpu: bool, kernels: Finding) -> list[Finding]:
    from engine.core.registry.backend_registry import backend_names
    from engine.tinygrad.clang import missing_clang

    found = []
    for name in backend_names():
        if name == "native":
            found.append(_native_backend(kernels))
            continue
        if name in _ELSEWHERE:
            found.append(Finding("backend", name, _ELSEWHERE[name]))
            continue
        packages, extra = _BACKEND_NEEDS.get(name, ((), ""))
        missing = [each for each in packages if _installed_version(each) is None]
        if missing:
            fix = f"pip install 'engine[{extra}]'"
            found.append(Finding("backend", name, f"needs {', '.join(missing)}", False, fix))
            continue
        if name == "tinygrad" and not has_gpu and (problem := missing_clang()) is not None:
            found.append(Finding("backend", name, "needs clang", False, problem))
            continue
        versions = [f"{each} {_installed_version(each)}" for each in packages]
        detail = f"can run ({', '.join(versions) or 'added by another package'})"
        if has_gpu and any(each.endswith("+cpu") for each in versions):
            detail += "; this build cannot use the GPU"
        found.append(Finding("backend", name, detail, True))
    return found


def _native_backend(kernels: Finding) -> Finding:
    if kernels.ok:
        return Finding("backend", "native", "can run on the CPU", True)
    return Finding("backend", "native", f"its kernels are {kernels.detail}", False, kernels.fix)


def _settings_and_model(config: Path | None) -> list[Finding]:
    from engine.core.folders import store_directory
    from engine.core.store.model_store import resolve_model

    store = store_directory()
    existing = next(each for each in (store, *store.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    room = Finding("model", "store", f"{store}, {free / _GIB:.1f} GiB free")
    try:
        model = load_cli_settings(config).settings.model.model_path
    except EngineError as error:
        return [Finding("settings", "settings", "not valid", False, str(error)), room]
    found = [Finding("settings", "settings", "valid", True), room]
    try:
        found.append(Finding("model", model, f"ready at {resolve_model(model)}", True))
    except EngineError as error:
        found.append(Finding("model", model, "not on this machine", False, str(error)))
    return found


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print_table(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    marks = {True: Text("yes", "green"), False: Text("no", "red"), None: Text("")}
    table = Table("", "what", "")
    table.add_column("detail", overflow="fold")
    topic = ""
    for each in findings:
        if each.topic != topic:
            table.add_section()
        detail = f"{each.detail}\n{each.fix}" if each.fix else each.detail
        heading = "" if each.topic == topic else each.topic
        table.add_row(heading, Text(each.name), marks[each.ok], Text(detail))
        topic = each.topic
    output().print(table)
