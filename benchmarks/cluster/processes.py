"""Servers and nodes as processes, for measurements on one machine: over loopback, or between two
network namespaces.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.features.frontend import free_port

MODEL = "smollm2-135m-instruct"
STEP_MS = 20.0
NAMESPACES = ("engine-bench-a", "engine-bench-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")


@contextmanager
def namespaces() -> Iterator[None]:
    """Two network namespaces with a cable between them."""
    one, two = NAMESPACES
    commands = [f"ip netns add {one}", f"ip netns add {two}"]
    commands.append(f"ip link add veth-a netns {one} type veth peer name veth-b netns {two}")
    for name, link, address in zip(NAMESPACES, ("veth-a", "veth-b"), ADDRESSES, strict=True):
        commands += [f"ip -n {name} addr add {address}/24 dev {link}"]
        commands += [f"ip -n {name} link set {link} up", f"ip -n {name} link set lo up"]
    try:
        for each in commands:
            subprocess.run(each.split(), check=True)
        yield
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def run_command(arguments: list[str]) -> None:
    """Run an `engine` command with an engine process that computes nothing."""
    from engine.cli import main
    from engine.cli.commands import app
    from engine.ipc import engine_process

    engine_process.WORKER_MODULE = "benchmarks.features.null_engine"
    main.EngineProcess = functools.partial(  # type: ignore[misc,assignment]
        main.EngineProcess, "benchmarks.features.null_engine"
    )
    app(arguments, prog_name="engine")


class Processes:
    """The servers and nodes of a measurement. They end with it. Servers are at `host`; nodes are in
    the network namespace `far`, if it is given.
    """

    def __init__(self, stack: ExitStack, host: str, far: str | None, is_null: bool = False) -> None:
        self._stack = stack
        self._host = host
        self._far = far
        self._is_null = is_null
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.token = self.folder / "token"
        self.token.write_text("benchmark-token-0123456789\n")
        self.token.chmod(0o600)

    def _start(self, name: str, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        module = "benchmarks.cluster.processes" if self._is_null else "engine.cli.main"
        argv = [sys.executable, "-m", module, *arguments]
        if self._far is not None and arguments[0] == "node":
            argv = ["ip", "netns", "exec", self._far, *argv]
        env = os.environ | variables
        env |= {"NULL_STEP_MS": str(STEP_MS), "LLM_ENGINE_SERVER__NODE_TOKEN_FILE": str(self.token)}
        log = self._stack.enter_context(self.log(name).open("w"))
        process = subprocess.Popen(argv, env=env, stderr=log, start_new_session=True)
        self._stack.callback(end, process)
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def serve(self, *options: str, **variables: str) -> str:
        """Start a server. Returns its URL, which answers a little later."""
        port = free_port()
        base = ("serve", MODEL, "--port", str(port), "--host", self._host, "--insecure-no-auth")
        self._start(f"server-{port}", *base, *options, **variables)
        return f"http://{self._host}:{port}"

    def join(self, url: str, name: str, *options: str) -> subprocess.Popen[bytes]:
        base = ("node", "join", url, "--token-file", str(self.token), "--name", name)
        return self._start(name, *base, "--model", MODEL, "--threads", "1", *options)

    def nodes(self, url: str) -> dict[str, dict[str, Any]]:
        """The nodes that are ready, by name."""
        key = self.token.read_text().strip()
        reply = httpx.get(f"{url}/v1/admin/nodes", headers={"authorization": f"Bearer {key}"})
        found = {each["name"]: each for each in reply.json()["nodes"]}
        return {name: each for name, each in found.items() if each["state"] == "ready"}

    def wait_for_nodes(self, url: str, *names: str) -> float:
        return wait_for(lambda: set(self.nodes(url)) == set(names))


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(condition: Any, seconds: float = 120.0) -> float:
    began = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except httpx.HTTPError:
            pass
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(0.01)


def wait_until_ready(url: str) -> None:
    wait_for(lambda: httpx.get(f"{url}/readyz").status_code == 200)


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[float]:
    """The times at which chunks of a streamed answer with text arrive."""
    fields = {"model": MODEL, "stream": True, "temperature": 0.0} | body
    async with client.stream("POST", f"{url}/v1/completions", json=fields) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                if event["choices"] and event["choices"][0]["text"]:
                    yield time.perf_counter()


if __name__ == "__main__":
    run_command(sys.argv[1:])
