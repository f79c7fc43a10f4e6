"""Counts the files and functions that run during one streamed chat, in the frontend and in the
engine process.

    python engine_tools/dev/trace_request.py smollm2-135m-instruct
    engine dev trace_request --files

Starts a server with a profile hook in each of its processes. Two chats warm up the server, and five
are recorded, each with the work that follows its last byte. Functions are counted if they run in
all five chats, and if their process does not run them while idle. A file is "before the engine" if
the frontend ran it before it sent the request to the engine.
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx

import engine

PACKAGE = Path(engine.__file__).parent
READY = re.compile(r"Ready in .* at (http://\S+)/v1")
SEND = ("ipc/transport.py", "encode_frame")
PATIENCE_S = 60.0
NUM_WARM, NUM_RECORDED = 2, 5
PAUSE_S = 0.3  # after a chat: longer than the server needs for its log
IDLE_S = 2.0  # longer than the period of any repeated work

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

T = TypeVar("T")
Call = tuple[str, str, float]  # file, function, time.monotonic()


@contextmanager
def served(model: str, folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Run a server whose processes record their calls. Yields its address and its process ids."""
    (folder / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(folder), str(PACKAGE.parent)])
    env = {"PYTHONPATH": path, "TRACE_PACKAGE": str(PACKAGE), "TRACE_FOLDER": str(folder)}
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


def chat(url: str, model: str) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S
    ) as stream:
        stream.raise_for_status()
        stream.read()


def recorded(model: str) -> list[tuple[list[Call], list[Call]]]:
    """For each recorded chat: the calls in the frontend and the calls in the engine, in order.
    Functions that also run while the server is idle are left out.
    """
    spans: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as name, served(model, Path(name)) as (url, pids):
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        # This request makes the server import the routes that it loads late.
        httpx.get(f"{url}/openapi.json", timeout=PATIENCE_S)
        for _ in range(NUM_WARM + NUM_RECORDED):
            began_at = time.monotonic()
            chat(url, model)
            time.sleep(PAUSE_S)
            spans.append((began_at, time.monotonic()))
        time.sleep(IDLE_S)
        idle = (spans[-1][1], time.monotonic())
        folder = Path(name)
        (folder / "asked").touch()
        paths = [folder / f"{pid}.json" for pid in pids]
        deadline = time.monotonic() + PATIENCE_S
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                sys.exit("a process did not write down what it had called")
            time.sleep(0.05)
        calls: list[list[Call]] = [
            [(file, function, at) for file, function, at in json.loads(path.read_text())]
            for path in paths
        ]
    frontend, engine = calls[0], [call for each in calls[1:] for call in each]
    frontend, engine = _without_idle(frontend, idle), _without_idle(engine, idle)
    return [(_within(frontend, span), _within(engine, span)) for span in spans[NUM_WARM:]]


def _without_idle(calls: Sequence[Call], idle: tuple[float, float]) -> list[Call]:
    repeated = {call[:2] for call in _within(calls, idle)}
    return [call for call in calls if call[:2] not in repeated]


def _within(calls: Sequence[Call], span: tuple[float, float]) -> list[Call]:
    return [call for call in calls if span[0] <= call[2] <= span[1]]


def before_engine(frontend: Sequence[Call]) -> set[str]:
    sent_at = min(at for file, function, at in frontend if (file, function) == SEND)
    return {file for file, _, at in frontend if at <= sent_at}


def common(sets: Iterable[set[T]]) -> set[T]:
    """The elements that all sets have in common."""
    return set.intersection(*sets)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument(
        "--files", action="store_true", help="list the files, in order of first call"
    )
    options = parser.parse_args(arguments)
    chats = recorded(options.model)
    places = common({call[:2] for call in [*frontend, *engine]} for frontend, engine in chats)
    functions = Counter(file for file, _ in places)
    before = functions.keys() & common(before_engine(frontend) for frontend, _ in chats)
    in_engine = functions.keys() & common({file for file, _, _ in engine} for _, engine in chats)
    print(f"files                   {len(functions):4}")
    print(f"folders                 {len({Path(file).parent for file in functions}):4}")
    print(f"functions               {len(places):4}")
    print(f"files before the engine {len(before):4}")
    print(f"files in the engine     {len(in_engine):4}")
    if options.files:
        for file in sorted(functions):
            marks = f"{'before' if file in before else '':8}{'engine' if file in in_engine else ''}"
            print(f"{functions[file]:4}  {marks:16}{file}")


if __name__ == "__main__":
    main()
