"""Measures the tiers of the prefix cache: time to first token in the four cases of a fair
comparison, with and without tiers.

`python -m benchmarks.features.tiers [MODEL] --output tiers.json` starts the engine without tiers,
with a disk tier, and with a Redis tier if redis-server is installed. Each case has prompts of its
own, and the order of cases and of engines is another in each round:

none       a prompt that no request had before
memory     a prompt again, in the same process
evicted    a prompt again, after the KV pool was emptied
restarted  a prompt again, after the server was restarted; the page cache has the files of the disk
cold       the same, but the files have to be read from the disk

At the end, all engines run side by side and get prompts without reuse in turn, for which tiers only
cost something: `load_cpu` is the CPU time per token of our processes, compared with that without
tiers, the median of seven rounds.
"""

import argparse
import asyncio
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.client import Failure, Sample, complete, new_session
from benchmarks.process import (
    RunningServer,
    ServerProcess,
    ServerSpec,
    exit_on_sigterm,
    process_tree,
)
from benchmarks.prompts import words

DEFAULT_MODEL = "smollm2-135m-instruct"
CASES = ("none", "memory", "evicted", "restarted", "cold")
NUM_OUTPUT = 8
LOAD_ROUNDS = 7
STORED_S = 1.5  # the time in which the answer of a request is stored


@dataclass(slots=True)
class Contender:
    """The engine with one set of tiers."""

    name: str
    config: str
    folder: Path
    ttft: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # by prompt
    cpu_s: list[float] = field(default_factory=list)  # per token, of the load without reuse
    num_tokens: list[int] = field(default_factory=list)  # of the measured prompts


class Bench:
    def __init__(self, model: str, port: int, folder: Path, length: int) -> None:
        self._model = model
        self._port = port
        self._folder = folder
        self._length = length
        self._key = secrets.token_hex(16)

    async def round(self, number: int, contender: Contender) -> None:
        """All cases for one contender, with prompts that are new in this round."""
        process, server = await self._start(contender)
        try:
            await self._ask(server, words(64, "warm", number, contender.name))
            shift = number % len(CASES)
            for case in CASES[shift:] + CASES[:shift]:
                prompt = words(self._length, "tiers", self._length, number, case)
                if case != "none":
                    await self._ask(server, prompt)
                if case in ("evicted", "restarted", "cold"):
                    await asyncio.sleep(STORED_S)
                    await self._flush(server)
                if case in ("restarted", "cold"):
                    process.stop()
                    if case == "cold":
                        chill(contender.folder)
                    process, server = await self._start(contender)
                await self._note(contender, case, server, prompt)
        finally:
            process.stop()

    async def load(self, found: Sequence[Contender]) -> None:
        """Prompts without reuse, for all contenders in turn."""
        running = [await self._start(each, index) for index, each in enumerate(found)]
        try:
            for number in range(LOAD_ROUNDS + 1):  # the first one warms up
                for shift in range(len(found)):
                    at = (number + shift) % len(found)
                    process, server = running[at]
                    before = cpu_seconds(server)
                    prompts = [words(self._length // 4, "load", number, i) for i in range(8)]
                    answers = await asyncio.gather(*(self._ask(server, each) for each in prompts))
                    await asyncio.sleep(STORED_S)
                    tokens = sum((each.prompt_tokens or 0) + NUM_OUTPUT for each in answers)
                    if number:
                        found[at].cpu_s.append((cpu_seconds(server) - before) / tokens)
        finally:
            for process, _ in running:
                process.stop()

    async def _start(
        self, contender: Contender, index: int = 0
    ) -> tuple[ServerProcess, RunningServer]:
        port = self._port + index
        path = self._folder / f"{contender.name}.toml"
        path.write_text(contender.config)
        command = (sys.executable, "-m", "engine.cli.main", "serve", self._model)
        address = ("--port", str(port), "--config", str(path))
        spec = ServerSpec(
            name=contender.name,
            command=(*command, *address),
            port=port,
            ready_path="/readyz",
            extra_body={"ignore_eos": True},
            env={"LLM_ENGINE_ADMIN_KEY": self._key},
        )
        process = ServerProcess(spec, self._folder / f"{contender.name}.log")
        return process, await process.start()

    async def _ask(self, server: RunningServer, prompt: str) -> Sample:
        async with new_session(600) as session:
            answer = await complete(session, server.target, prompt, NUM_OUTPUT)
        if isinstance(answer, Failure):
            raise SystemExit(f"{server.spec.name}: {answer.reason}")
        return answer

    async def _note(
        self, contender: Contender, case: str, server: RunningServer, prompt: str
    ) -> None:
        answer = await self._ask(server, prompt)
        contender.ttft.setdefault(case, []).append(answer.ttft)
        contender.texts[prompt] = answer.text
        contender.num_tokens.append(answer.prompt_tokens or 0)

    async def _flush(self, server: RunningServer) -> None:
        headers = {"authorization": f"Bearer {self._key}"}
        url = f"{server.spec.base_url}/v1/admin/cache/flush"
        async with new_session(60) as session, session.post(url, json={}, headers=headers) as reply:
            reply.raise_for_status()


def cpu_seconds(server: RunningServer) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in process_tree(server.pid))


def chill(folder: Path) -> None:
    """Remove the files of a folder from the page cache."""
    for path in folder.rglob("*.full"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def contenders(folder: Path, redis_socket: Path | None) -> list[Contender]:
    disk = folder / "kv"
    folder.mkdir()
    disk.mkdir(mode=0o700)
    found = [
        Contender("off", "", folder / "none"),
        Contender("disk", f'[cache.tiers]\ndisk_path = "{disk}"\n', disk),
    ]
    if redis_socket is not None:
        secret = folder / "redis_url"
        secret.write_text(f"unix://{redis_socket}")
        config = f'[cache.tiers]\nredis_url_file = "{secret}"\n'
        found.append(Contender("redis", config, folder / "none"))
    return found


def summary(found: Sequence[Contender]) -> dict[str, Any]:
    base = found[0]
    computed = statistics.median(base.ttft["none"])
    rows: dict[str, Any] = {}
    for each in found:
        medians = {case: statistics.median(values) for case, values in each.ttft.items()}
        load = [own / off for off, own in zip(base.cpu_s, each.cpu_s, strict=True)]
        rows[each.name] = {
            "ttft_s": {case: round(value, 4) for case, value in medians.items()},
            "of_computing": {case: round(value / computed, 3) for case, value in medians.items()},
            "load_cpu": round(statistics.median(load), 3),
            "same_text": each.texts == base.texts,
        }
    tokens = round(statistics.median(base.num_tokens))
    return {"prompt_tokens": tokens, "rounds": len(base.ttft["none"]), "contenders": rows}


async def measure(
    arguments: argparse.Namespace, folder: Path, redis: Path | None
) -> list[dict[str, Any]]:
    results = []
    for length in arguments.lengths:
        found = contenders(folder / str(length), redis)
        bench = Bench(arguments.model, arguments.port, folder, length)
        for number in range(arguments.rounds):
            for shift in range(len(found)):
                await bench.round(number, found[(number + shift) % len(found)])
        await bench.load(found)
        results.append(summary(found))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024], help="words of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8391)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    exit_on_sigterm()
    program, redis, socket = shutil.which("redis-server"), None, None
    with tempfile.TemporaryDirectory(prefix="tiers-") as name:
        folder = Path(name)
        try:
            if program is not None:
                socket = folder / "redis.sock"
                options = ("--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", name)
                redis = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
            result = asyncio.run(measure(arguments, folder, socket))
        finally:
            if redis is not None:
                redis.terminate()
                redis.wait()
    print(json.dumps(result, indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
