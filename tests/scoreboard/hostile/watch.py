"""What a figure of hostile requests watches: innocent clients, the engine's life, memory."""

import asyncio
import contextlib
import itertools
import json
from pathlib import Path

import psutil

from engine.core.sandbox.liveness import FROZEN_AFTER_S
from engine.ipc.engine_process import WORKER_MODULE
from tests.scoreboard.meters import MEBIBYTE, rss_of
from tests.scoreboard.served_engine import Served
from tests.scoreboard.streams import CHAT, COMPLETIONS, Reply, ask, completion

NUM_INNOCENT = 3
PAUSE_S = 0.3  # between the requests of an innocent client
LOOK_EVERY_S = 0.1


class Innocent:
    """A client of another tenant. It repeats its request, and counts every answer that differs
    from the one that it got alone.
    """

    def __init__(self, served: Served, model: str, key: str, number: int) -> None:
        self._served = served
        self._headers = {"Authorization": f"Bearer {key}"}
        prompt = f"{number}. The sky is"
        fields = {"model": model, "max_tokens": 12, "stream": number % 2 == 0, "logprobs": 1}
        self._path, self._body = COMPLETIONS, completion(prompt, **fields)
        if number % 3 == 2:
            del self._body["prompt"]
            said = [{"role": "user", "content": prompt}]
            self._path, self._body = CHAT, self._body | {"messages": said, "logprobs": True}
        self._expected: Reply | None = None
        self.num_asked = 0
        self.failures: list[str] = []

    async def learn(self) -> None:
        self._expected = await self._ask()
        assert self._expected.is_whole, self._expected.problem or self._expected.error

    async def run(self) -> None:
        """Repeat the request until cancelled."""
        assert self._expected is not None
        while True:
            reply = await self._ask()
            self.num_asked += 1
            if not reply.is_whole:
                self.failures.append(f"innocent: {reply.status} {reply.problem or reply.error}")
            elif (reply.texts, reply.scores) != (self._expected.texts, self._expected.scores):
                self.failures.append(f"innocent: {reply.texts} instead of {self._expected.texts}")
            await asyncio.sleep(PAUSE_S)

    async def _ask(self) -> Reply:
        return await ask(self._served, self._body, self._path, headers=self._headers)


class Watch:
    """Counts deaths of processes and bad answers of /health, until cancelled."""

    def __init__(self, served: Served, silences: Path) -> None:
        self._served = served
        self._silences = silences
        self._server = psutil.Process(served.process.pid)
        self._engine = self._find_engine()
        self.engine_deaths = self.server_deaths = self.unhealthy = 0
        self.failures: list[str] = []

    async def run(self) -> None:
        while True:
            await self.look_once()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look_once(self) -> None:
        if self._served.process.poll() is not None:
            self.server_deaths = 1
            self.failures.append("the server died: " + " | ".join(self._served.log[-5:]))
            raise RuntimeError(self.failures[-1])
        if self._engine is None or not self._engine.is_running():
            found = self._find_engine()
            if self._engine is not None:
                self.engine_deaths += 1
                told = [line for line in self._served.log if "ngine" in line]
                self.failures.append("the engine died: " + " | ".join(told[-3:]))
            self._engine = found
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            status = await _status(self._served.address, "/health")
            if status != 200:
                self.unhealthy += 1

    def _find_engine(self) -> psutil.Process | None:
        for each in self._server.children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if WORKER_MODULE in each.cmdline():
                    return each
        return None

    def rss_mib(self) -> tuple[float, float]:
        """RSS of the server, and of all its children."""
        children = self._server.children(recursive=True)
        return rss_of([self._server]) / MEBIBYTE, rss_of(children) / MEBIBYTE

    def tracebacks(self) -> list[str]:
        """The last lines of the tracebacks in the log: exceptions that nobody expected."""
        entries = itertools.groupby(self._served.log, key=lambda line: line.startswith("    | "))
        blocks = [list(lines) for is_block, lines in entries if is_block]
        return [block[-1].strip(" |") for block in blocks if "Traceback" in block[0]]

    def silences(self) -> list[float]:
        lines = self._silences.read_text().splitlines()
        return [json.loads(line)["silent_s"] for line in lines]

    def num_silent(self) -> int:
        """How often the engine was seen silent for as long as a frozen one."""
        return sum(silent_s > FROZEN_AFTER_S for silent_s in self.silences())


async def _status(address: tuple[str, int], path: str) -> int:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        line = await reader.readline()
        return int(line.split()[1]) if line else 0
    finally:
        writer.close()
