"""Server processes: start, wait for the first answer, stop, and measure what they use.

A server runs in its own process group, and only that group is ever signalled.
"""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.client import Failure, Target, complete, first_model, new_session
from benchmarks.prompts import words

STOP_SECONDS = 30


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to start a server on a loopback port, and how to send requests to it."""

    name: str
    command: tuple[str, ...]
    port: int
    ready_path: str = "/v1/models"  # answers 200 once the server takes requests
    model: str | None = None  # None: the first that /v1/models lists
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    note: str = ""  # what a reader must know to compare the figures
    slow_start: bool = False  # takes minutes: started once, not once per round
    only: frozenset[str] = frozenset()  # labels of the scenarios to run; empty: all

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class RunningServer:
    spec: ServerSpec
    target: Target
    pid: int
    ready_s: float  # process start until `ready_path` answers
    first_completion_s: float  # process start until the first completion


def _environment() -> dict[str, str]:
    """Our environment, but servers may cache bytecode, as they do for users."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


class ServerError(Exception):
    """The server did not start; the message names its log."""


class ServerProcess:
    def __init__(self, spec: ServerSpec, log: Path) -> None:
        self._spec = spec
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, timeout: float = 600) -> RunningServer:
        with open(self._log, "ab") as log:
            started = time.perf_counter()
            process = subprocess.Popen(
                self._spec.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_environment(), **self._spec.env},
                start_new_session=True,
            )
        self._process = process
        ready: float | None = None
        async with new_session(timeout) as session:
            while process.poll() is None and time.perf_counter() - started < timeout:
                with contextlib.suppress(
                    aiohttp.ClientError, TimeoutError, LookupError, ValueError
                ):
                    async with session.get(self._spec.base_url + self._spec.ready_path) as reply:
                        reply.raise_for_status()
                    ready = ready or time.perf_counter() - started
                    model = self._spec.model or await first_model(session, self._spec.base_url)
                    target = Target(self._spec.base_url, model, self._spec.extra_body)
                    answer = await complete(session, target, words(8, "first", started), 1)
                    if not isinstance(answer, Failure):
                        done = time.perf_counter() - started
                        return RunningServer(self._spec, target, process.pid, ready, done)
                await asyncio.sleep(0.05)
        self.stop()
        raise ServerError(f"{self._spec.name} did not answer; its output is in {self._log}")

    def stop(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        tree = process_tree(process.pid)
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        given_up = time.perf_counter() + STOP_SECONDS / 10
        while (left := list(filter(_runs, tree))) and time.perf_counter() < given_up:
            time.sleep(0.02)
        for straggler in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                straggler.kill()
        process.wait()


def _runs(process: psutil.Process) -> bool:
    """Whether it has not ended. Who reaps what it left may take its time."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind like Ctrl-C does, so that `finally` clauses stop the servers."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def process_tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def peak_rss_mb(pid: int) -> float:
    """The sum of peak RSS over the process tree; shared pages count once per process."""
    total_kb = 0
    for process in process_tree(pid):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            peaks = [line for line in status.splitlines() if line.startswith("VmHWM:")]
            total_kb += sum(int(line.split()[1]) for line in peaks)
    return round(total_kb / 1024, 1)


class CoresMeter:
    """Cores busy since construction: by the server, by this client, and by other processes."""

    def __init__(self, server_pid: int | None) -> None:
        self._pid = server_pid
        self._started = time.perf_counter()
        self._before = self._read()

    def read(self) -> dict[str, float]:
        wall = time.perf_counter() - self._started
        server, client, busy, steal = (
            (after - before) / wall
            for before, after in zip(self._before, self._read(), strict=True)
        )
        if self._pid is None:
            return {"client": client, "steal": steal}
        others = busy - server - client
        return {"server": server, "client": client, "others": others, "steal": steal}

    def _read(self) -> tuple[float, float, float, float]:
        server = 0.0
        for process in process_tree(self._pid) if self._pid is not None else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                server += times.user + times.system
        own = resource.getrusage(resource.RUSAGE_SELF)
        machine = psutil.cpu_times()
        busy = machine.user + machine.nice + machine.system + machine.irq + machine.softirq
        return server, own.ru_utime + own.ru_stime, busy, machine.steal
