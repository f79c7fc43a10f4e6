"""Counts the files and functions that run during one streamed chat, in the frontend and in the
engine process.

    python engine_tools/dev/trace_request.py smollm2-135m-instruct
    engine dev trace_request --files

Starts a server with a profile hook in each of its processes. Two chats warm up the server, and five
are recorded, from the request to its last byte. Each has a prompt of its own, which no cache knows.
A file is counted if one of its functions runs in all five chats, or while the server is idle. It is
"before the engine" if the server ran it in all five chats before it sent the request to the engine.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

import engine

PACKAGE = Path(engine.__file__).parent
READY = re.compile(r"Ready in .* at (http://\S+)/v1")
SEND = ("ipc/transport.py", "encode_frame")
PATIENCE_S = 60.0
NUM_WARM, NUM_RECORDED = 2, 5
PAUSE_S = 0.3  # after a chat: longer than the server needs for its log
IDLE_S = 2.0  # longer than the period of the work that a server often repeats

# Content of a file sitecustomize.py. Python runs such a file at the start of every interpreter that
# has the file's folder in PYTHONPATH.
HOOK = """
import json, os, sys, threading, time
package, folder = os.environ["TRACE_PACKAGE"], os.environ["TRACE_FOLDER"]
calls = []

def profile(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(package):
        calls.append((code.co_filename[len(package) + 1 :], code.co_qualname, time.monotonic()))

def write_when_asked():
    while not os.path.exists(os.path.join(folder, "asked")):
        time.sleep(0.05)
    path = os.path.join(folder, str(os.getpid()))
    with open(path + ".part", "w") as file:
        json.dump(list(calls), file)
    os.rename(path + ".part", path + ".json")

threading.Thread(target=write_when_asked, daemon=True).start()
sys.setprofile(profile)
threading.setprofile(profile)
"""

Call = tuple[str, str, float]  # file, function, time.monotonic()
Place = tuple[str, str]  # file, function


@dataclass(frozen=True, slots=True)
class Trace:
    """The functions that every recorded chat runs, and those that an idle server runs."""

    server: Set[Place]
    before: Set[Place]  # in the server, before the request is sent to the engine
    engine: Set[Place]
    idle: Set[Place]

    @property
    def all(self) -> Set[Place]:
        return self.server | self.engine | self.idle


def files(places: Set[Place]) -> set[str]:
    return {file for file, _ in places}


@contextmanager
def served(model: str, folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Run a server whose processes record their calls. Yields its address and its process ids."""
    (folder / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(folder), str(PACKAGE.parent)])
    env = {"PYTHONPATH": path, "TRACE_PACKAGE": str(PACKAGE), "TRACE_FOLDER": str(folder)}
    # A server whose queues have a database looks for jobs in it.
    env["LLM_ENGINE_STORAGE__PATH"] = str(folder / "data")
    # A request is logged after its last byte, so a slow machine would count it now and then.
    env["LLM_ENGINE_LOGGING__LOG_REQUESTS"] = "false"
    argv = [sys.executable, "-m", "engine.cli.main", "serve", model, "--port", "0"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env={**os.environ, **env})
    try:
        assert process.stderr is not None
        found = next((match for line in process.stderr if (match := READY.search(line))), None)
        if found is None:
            sys.exit(f"the server did not start: try `engine serve {model}`")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield found[1], [process.pid, *map(int, children)]
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def chat(url: str, model: str, number: int) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{number} says hello. Greet {number}."}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S
    ) as stream:
        stream.raise_for_status()
        stream.read()


def recorded(model: str) -> Trace:
    spans: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as name, served(model, Path(name)) as (url, pids):
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        # This request makes the server import the routes that it loads late.
        httpx.get(f"{url}/openapi.json", timeout=PATIENCE_S)
        for number in range(NUM_WARM + NUM_RECORDED):
            began_at = time.monotonic()
            chat(url, model, 7919 * number)
            spans.append((began_at, time.monotonic()))
            time.sleep(PAUSE_S)
        idle = (time.monotonic(), time.monotonic() + IDLE_S)
        time.sleep(IDLE_S)
        server, *engines = _written(Path(name), pids)
    del spans[:NUM_WARM]
    engine = [call for each in engines for call in each]
    sent = [at for file, function, at in server if (file, function) == SEND]
    befores = [(begin, min(at for at in sent if at >= begin)) for begin, _ in spans]
    return Trace(
        server=_common(server, spans),
        before=_common(server, befores),
        engine=_common(engine, spans),
        idle=_common([*server, *engine], [idle]),
    )


def _written(folder: Path, pids: Sequence[int]) -> list[list[Call]]:
    """Let each process write down its calls, and read them."""
    (folder / "asked").touch()
    paths = [folder / f"{pid}.json" for pid in pids]
    deadline = time.monotonic() + PATIENCE_S
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            sys.exit("a process did not write down what it had called")
        time.sleep(0.05)
    return [
        [(file, function, at) for file, function, at in json.loads(path.read_text())]
        for path in paths
    ]


def _common(calls: Sequence[Call], spans: Sequence[tuple[float, float]]) -> set[Place]:
    """The functions that run in each of these spans of time."""
    within = (
        {(file, function) for file, function, at in calls if begin <= at <= end}
        for begin, end in spans
    )
    return set.intersection(*within)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--files", action="store_true", help="list the files")
    options = parser.parse_args(arguments)
    trace = recorded(options.model)
    functions = Counter(file for file, _ in trace.all)
    before, server = files(trace.before), files(trace.server)
    in_engine, idle = files(trace.engine), files(trace.idle)
    print(f"files                   {len(functions):4}")
    print(f"folders                 {len({Path(file).parent for file in functions}):4}")
    print(f"functions               {len(trace.all):4}")
    print(f"files before the engine {len(before):4}")
    print(f"files in the server     {len(server):4}")
    print(f"files in the engine     {len(in_engine):4}")
    print(f"files only while idle   {len(idle - server - in_engine):4}")
    if options.files:
        for file in sorted(functions):
            where = ("before" if file in before else "", "engine" if file in in_engine else "")
            marks = (*where, "idle" if file in idle else "")
            print(f"{functions[file]:4}  {''.join(f'{mark:8}' for mark in marks)}{file}")


if __name__ == "__main__":
    main()
