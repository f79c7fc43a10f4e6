"""Starts servers: timed cold starts, and servers that stay up side by side."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.figures import spread
from benchmarks.peers import OURS
from benchmarks.process import RunningServer, ServerError, ServerProcess, ServerSpec

PACKED_FILES = "engine/packed/*.packed"  # in the user's cache folder
PACKED_SECONDS = 60  # max wait until the engine has written its packed weights

Say = Callable[[str], None]

START_SECONDS = 600.0
SLOW_START_SECONDS = 1800.0  # of servers that compile their model first


@contextlib.asynccontextmanager
async def live_servers(
    specs: Sequence[ServerSpec], logs: Path, say: Say
) -> AsyncIterator[dict[str, RunningServer]]:
    """All servers, up and answering. A peer that does not start is left out."""
    processes: list[ServerProcess] = []
    running: dict[str, RunningServer] = {}
    try:
        for spec in specs:
            say(f"starting {spec.name}" + (", which takes minutes" if spec.slow_start else ""))
            processes.append(ServerProcess(spec, log_of(spec, logs)))
            try:
                limit = SLOW_START_SECONDS if spec.slow_start else START_SECONDS
                running[spec.name] = await processes[-1].start(limit)
            except ServerError as error:
                if spec.name == OURS:
                    raise
                say(f"{spec.name} is left out: {error}")
        yield running
    finally:
        for process in processes:
            process.stop()


async def cold_starts(
    specs: Sequence[ServerSpec], rounds: int, logs: Path, say: Say
) -> dict[str, dict[str, dict[str, Any]]]:
    """Seconds from process start to the first completion, `rounds` times for each server,
    alternating.

    The engine starts with an empty cache folder, and again with the packed weights that the first
    start left there. Servers that take minutes to start are left out.
    """
    unpacked: dict[str, list[float]] = {}
    usual: dict[str, list[float]] = {}
    for number in range(rounds):
        for spec in (spec for spec in specs if not spec.slow_start and not spec.only):
            say(f"round {number + 1}: start of {spec.name}")
            log = log_of(spec, logs)
            try:
                if spec.name == OURS:
                    first, second = await _both_engine_starts(spec, log)
                    unpacked.setdefault(spec.name, []).append(first)
                    if second is None:
                        say("the engine kept no packed weights: a start with them is not measured")
                        continue
                    usual.setdefault(spec.name, []).append(second)
                else:
                    usual.setdefault(spec.name, []).append(await _time_start(spec, log))
            except ServerError as error:
                say(str(error))
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name in {**unpacked, **usual}:
        # A peer has no such cache: one figure counts for both.
        first_times, times = unpacked.get(name, usual.get(name, [])), usual.get(name, [])
        results[name] = {"cold unpacked": cold_figures(first_times), "cold": cold_figures(times)}
    return results


def cold_figures(seconds: list[float]) -> dict[str, Any]:
    return {"first_completion_s": spread(seconds, 3)}


def log_of(spec: ServerSpec, logs: Path) -> Path:
    return logs / f"{spec.name.replace(' ', '-')}.log"


async def _both_engine_starts(spec: ServerSpec, log: Path) -> tuple[float, float | None]:
    with tempfile.TemporaryDirectory(prefix="engine-bench-cache-") as folder:
        cold = replace(spec, env={**spec.env, "XDG_CACHE_HOME": folder})
        first = await _time_start(cold, log, wait_for=folder)
        if not any(Path(folder).glob(PACKED_FILES)):
            return first, None
        return first, await _time_start(cold, log)


async def _time_start(spec: ServerSpec, log: Path, wait_for: str | None = None) -> float:
    """Start and stop a server. `wait_for` names a cache folder that must be filled before the
    stop.
    """
    process = ServerProcess(spec, log)
    try:
        running = await process.start()
        given_up = time.perf_counter() + PACKED_SECONDS
        while wait_for and time.perf_counter() < given_up:
            if any(Path(wait_for).glob(PACKED_FILES)):
                break
            await asyncio.sleep(0.1)
        return running.first_completion_s
    finally:
        process.stop()
