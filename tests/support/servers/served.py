"""Starts `engine serve` as a child process, as a user would, and returns its address."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import psutil

from engine.ipc.engine_process import WORKER_MODULE

TRAINER_MODULE = "engine.finetuning.child"
READY = re.compile(r"Ready in .* at (http://\S+)/v1")
START_TIMEOUT_S = 120.0


@dataclass
class ServedEngine:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    log: list[str] = field(default_factory=list)

    @property
    def model(self) -> str:
        return str(httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"])

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, over all labels."""
        text = httpx.get(f"{self.url}/metrics").text
        rows = [line for line in text.splitlines() if re.match(rf"{re.escape(name)}(\{{| )", line)]
        assert rows, f"no metric {name}"
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows)

    def blocks_in_use(self) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        (row,) = [r for r in text.splitlines() if r.startswith("engine_kv_blocks{") and "used" in r]
        return float(row.rsplit(" ", 1)[1])

    def engine_pid(self) -> int:
        """The engine process, beside which a server may have one that checks grammars."""
        children = psutil.Process(self.process.pid).children()
        (engine,) = [each for each in children if WORKER_MODULE in each.cmdline()]
        return engine.pid

    def trainers(self) -> list[psutil.Process]:
        """The training process of a fine-tuning job, if one runs."""
        found = []
        for each in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if TRAINER_MODULE in each.cmdline():
                    found.append(each)
        return found

    def wait_until(self, condition, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"it never became true: {condition}"
            time.sleep(0.05)


@contextmanager
def serve(
    *arguments: str,
    env: dict[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
    module: str = "engine.cli.main",
) -> Iterator[ServedEngine]:
    """Run `engine serve ARGUMENTS` on a free port, until the block ends."""
    argv = [sys.executable, "-m", module, "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(
        argv, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )
    served = ServedEngine(process, "")
    ready = threading.Event()

    def read_log() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            served.log.append(line.rstrip())
            if match := READY.search(line):
                served.url = match[1]
                ready.set()
        ready.set()

    threading.Thread(target=read_log, daemon=True).start()
    try:
        assert ready.wait(timeout_s) and served.url, "\n".join(served.log)
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
