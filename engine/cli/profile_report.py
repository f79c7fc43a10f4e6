"""A profile as tables and as JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.console import output

if TYPE_CHECKING:
    from rich.table import Table

    from engine.backends.custom.profiling import FirstToken, Profile

_NAME_WIDTH = 64


def profile_json(path: str, backend: str, found: "Profile") -> str:
    facts = asdict(found)
    facts["first_token"]["total_s"] = found.first_token.total_s
    facts["kernels_s"] = sum(kernel.seconds for kernel in found.kernels)
    return json.dumps({"path": path, "backend": backend, **facts}, indent=2)


def print_profile(
    path: str, backend: str, found: "Profile", requests: int, top: int, trace: Path | None
) -> None:
    console = output()
    prompt, new = found.num_prompt_tokens // requests, found.num_new_tokens // requests
    lines = [
        f"{path}: {backend} on {found.device}, {found.dtype}",
        f"{requests} x {prompt:,} tokens in, {new:,} out: {found.seconds:.3f} s, "
        f"{found.num_new_tokens / found.seconds:,.0f} new tokens/s, {found.num_steps:,} steps",
        *_host(found),
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print("", _first_token_table(found.first_token), "")
    if found.kernels:
        console.print(_kernel_table(found, top))
    else:
        console.print("PyTorch's profiler saw no kernel: CUPTI is missing, or may not be used here")
    if trace is not None:
        console.print(f"Trace: {trace}", highlight=False, markup=False, soft_wrap=True)


def _host(found: "Profile") -> Iterator[str]:
    """Where the device works beside the host: how much of each step the host is busy itself."""
    if found.device != "cpu":
        step_ms = 1e3 * found.seconds / found.num_steps
        host_ms = 1e3 * found.host_s / found.num_steps
        busy = sum(kernel.seconds for kernel in found.kernels) / found.recorded_s
        yield f"A step takes {step_ms:.3f} ms, the host's own work in it {host_ms:.3f} ms"
        yield f"Kernels ran in {busy:.0%} of the recorded time"


def _first_token_table(first: "FirstToken") -> "Table":
    total = first.total_s
    parts = {
        "tokenize": first.tokenize_s,
        "queue": first.queue_s,
        "prefill": first.prefill_s,
        "first sample": first.first_sample_s,
        "total": total,
    }
    table = _table("time to first token", "ms", "share")
    for name, seconds in parts.items():
        if seconds is not None:
            table.add_row(name, f"{1e3 * seconds:.3f}", f"{seconds / total:.1%}")
    return table


def _kernel_table(found: "Profile", top: int) -> "Table":
    total = sum(kernel.seconds for kernel in found.kernels)
    table = _table("kernel", "calls", "ms", "share", "us each")

    def add(name: str, calls: int, seconds: float) -> None:
        row: tuple[Any, ...] = (f"{calls:,}", f"{1e3 * seconds:.3f}", f"{seconds / total:.1%}")
        table.add_row(_short(name), *row, f"{1e6 * seconds / calls:.1f}")

    for kernel in found.kernels[:top]:
        add(kernel.name, kernel.calls, kernel.seconds)
    rest = found.kernels[top:]
    if rest:
        calls = sum(kernel.calls for kernel in rest)
        add(f"{len(rest)} others", calls, sum(kernel.seconds for kernel in rest))
    return table


def _table(first: str, *columns: str) -> "Table":
    from rich.table import Table

    table = Table(first, box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _short(name: str) -> str:
    """Template arguments make names of many lines."""
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 3]}..."
