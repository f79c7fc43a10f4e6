"""Measures the frontend's cost of a streamed token, from the engine's message to bytes in a socket.

`python -m benchmarks.features.frontend` serves a model's text part over an engine that computes
nothing, at a pace that a client on the same machine can follow. It prints CPU time per token of the
main frontend process and of its HTTP workers. `--cold` prints the time from process start to the
first completion instead.
"""

import argparse
import functools
import itertools
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

WRITER = "engine.servers.http_workers.main"
PATHS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Go on."}]}),
    "completions": ("/v1/completions", {"prompt": "Go on"}),
}


def serve(model: str, port: int, frontends: int) -> None:
    """Run `engine serve` with the engine process replaced."""
    from engine.cli import main
    from engine.cli.commands import app

    main.EngineProcess = functools.partial(  # type: ignore[misc,assignment]
        main.EngineProcess, "benchmarks.features.null_engine"
    )
    arguments = ["--frontends", str(frontends), "--log-level", "warning"]
    app(["serve", model, "--port", str(port), *arguments], prog_name="engine")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """The server in its own process group."""

    def __init__(self, model: str, step_ms: float, frontends: int = 1) -> None:
        self.model = model
        self.port = free_port()
        argv = [sys.executable, "-m", "benchmarks.features.frontend", "--serve", str(self.port)]
        argv += ["--frontends", str(frontends)]
        env = os.environ | {"NULL_STEP_MS": str(step_ms)}
        self.started = time.perf_counter()
        self.process = subprocess.Popen([*argv, "--model", model], env=env, start_new_session=True)

    def wait(self) -> float:
        """Seconds from process start to the first completion."""
        while b" 200 " not in (answer := self._try()):
            assert self.process.poll() is None and b" 400 " not in answer, answer
            time.sleep(0.002)
        return time.perf_counter() - self.started

    def _try(self) -> bytes:
        try:
            with socket.create_connection(("127.0.0.1", self.port)) as connection:
                connection.sendall(request("completions", self, 1, close=True))
                return connection.recv(4096)
        except OSError as error:
            return str(error).encode()

    def cpu_s(self) -> float:
        """CPU time of all threads of the main process so far."""
        return _cpu_s(self.process.pid)

    def http_workers(self) -> list[int]:
        """The other frontend processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [pid for pid in map(int, children.split()) if WRITER in _command(pid)]

    def settle(self, num_workers: int) -> None:
        """Wait until the HTTP workers hold the connections, and until late routes are imported."""
        while len(self.http_workers()) < num_workers:
            time.sleep(0.05)
        time.sleep(2.0)
        for kind in PATHS:
            measure(self, kind, 4, 4)

    def workers_cpu_s(self) -> float:
        return sum(map(_cpu_s, self.http_workers()))

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(30)


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((each / "schedstat").read_text().split()[0]) for each in tasks.iterdir()) / 1e9


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def request(kind: str, server: Server, max_tokens: int, close: bool = False) -> bytes:
    path, question = PATHS[kind]
    fields = {"model": server.model, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(question | fields).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"Connection: {'close' if close else 'keep-alive'}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def drain(connections: list[socket.socket]) -> tuple[int, int]:
    """Read every stream to its end. Returns the numbers of events and of reads."""
    selector = selectors.DefaultSelector()
    for connection in connections:
        selector.register(connection, selectors.EVENT_READ)
    num_events = num_reads = 0
    num_open = len(connections)
    while num_open:
        for key, _ in selector.select():
            data = key.fileobj.recv(65_536)  # type: ignore[union-attr]
            num_reads += 1
            num_events += data.count(b"data: {")
            if b"[DONE]" in data or not data:
                selector.unregister(key.fileobj)
                num_open -= 1
    return num_events, num_reads


def measure(server: Server, kind: str, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Measure one wave of streams."""
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(num_streams)]
    cpu, workers, began = server.cpu_s(), server.workers_cpu_s(), time.perf_counter()
    for connection in connections:
        connection.sendall(request(kind, server, num_tokens))
    num_events, num_reads = drain(connections)
    seconds, cpu = time.perf_counter() - began, server.cpu_s() - cpu
    workers = server.workers_cpu_s() - workers
    for connection in connections:
        connection.close()
    total = num_streams * num_tokens
    # Events besides tokens: the finish, and a chat's role.
    extra = num_streams * (2 if kind == "chat" else 1)
    busiest = max(cpu, workers / max(len(server.http_workers()), 1))
    return {
        "cpu_us_per_token": cpu / total * 1e6,
        "workers_us_per_token": workers / total * 1e6,
        # What the frontend could send if its busiest process had a core of its own
        "ceiling_tokens_per_s": total / busiest,
        "tokens_per_s": total / seconds,
        "events_per_token": (num_events - extra) / total,
        "reads_per_token": num_reads / total,
    }


def cold(model: str, repeat: int) -> None:
    seconds, cpu = [], []
    for _ in range(repeat):
        server = Server(model, 0)
        seconds.append(server.wait())
        cpu.append(server.cpu_s())
        server.stop()
    for name, values in (("first_completion_s", seconds), ("frontend_cpu_s", cpu)):
        spread = {"median": statistics.median(values), "min": min(values)}
        print(json.dumps({name: {key: round(value, 3) for key, value in spread.items()}}))


def wave(asked: argparse.Namespace, num_streams: int, frontends: int) -> None:
    server = Server(asked.model, num_streams / asked.rate * 1e3, frontends)
    try:
        server.wait()
        server.settle(frontends - 1)
        for kind in PATHS:
            runs = [measure(server, kind, num_streams, asked.tokens) for _ in range(asked.repeat)]
            best = min(runs, key=lambda run: run["cpu_us_per_token"])
            figures = {name: round(value, 3) for name, value in best.items()}
            told = {"streams": num_streams, "frontends": frontends, "path": kind}
            print(json.dumps(told | figures), flush=True)
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1600, help="tokens/s of all streams together")
    parser.add_argument("--frontends", type=int, nargs="+", default=[1])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        serve(asked.model, asked.serve, asked.frontends[0])
        return
    if asked.cold:
        cold(asked.model, asked.repeat)
        return
    for num_streams, frontends in itertools.product(asked.streams, asked.frontends):
        wave(asked, num_streams, frontends)


if __name__ == "__main__":
    main()
