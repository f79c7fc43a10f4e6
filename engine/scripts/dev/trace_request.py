"""Which files and functions one streamed chat touches, in both processes.

    python engine/scripts/dev/trace_request.py smollm2-135m-instruct
    engine dev trace_request --files

A server is started with a profile hook in each of its processes. Two chats warm it up; the third
is recorded. A file is "before the engine" if the frontend ran it before the engine's intake ran.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

PACKAGE = Path(__file__).parents[2]
READY = re.compile(r"Ready in .* at (http://\S+)/v1")
INTAKE = ("backends/custom/runtime/intake.py", "Intake.submit")
PATIENCE_S = 60.0

# Every interpreter that is started with this on its path runs it first.
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


@contextmanager
def served(model: str, folder: Path) -> Iterator[tuple[str, list[int]]]:
    """A server with the hook in it: its address, and the ids of its processes."""
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
        "stream": True,
    }
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S
    ) as stream:
        stream.raise_for_status()
        stream.read()


def recorded(model: str) -> tuple[list[Call], list[Call]]:
    """What the third chat called, in the frontend and in the engine, in order."""
    with tempfile.TemporaryDirectory() as name, served(model, Path(name)) as (url, pids):
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        httpx.get(f"{url}/openapi.json", timeout=PATIENCE_S)  # has the late routes imported
        chat(url, model)
        chat(url, model)
        began_at = time.monotonic()
        chat(url, model)
        ended_at = time.monotonic()
        folder = Path(name)
        (folder / "asked").touch()
        paths = [folder / f"{pid}.json" for pid in pids]
        deadline = time.monotonic() + PATIENCE_S
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                sys.exit("a process did not write down what it had called")
            time.sleep(0.05)
        calls = [json.loads(path.read_text()) for path in paths]
    during = [[(*call,) for call in each if began_at <= call[2] <= ended_at] for each in calls]
    return during[0], [call for each in during[1:] for call in each]


def summary(frontend: Sequence[Call], engine: Sequence[Call]) -> dict[str, int]:
    entered_at = min(at for file, function, at in engine if (file, function) == INTAKE)
    both = [*frontend, *engine]
    files = {file for file, _, _ in both}
    return {
        "files": len(files),
        "folders": len({str(Path(file).parent) for file in files}),
        "functions": len({(file, function) for file, function, _ in both}),
        "files_before_the_engine": len({file for file, _, at in frontend if at < entered_at}),
        "files_in_the_engine": len({file for file, _, _ in engine}),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument(
        "--files", action="store_true", help="list the files, in order of first call"
    )
    options = parser.parse_args(arguments)
    frontend, engine = recorded(options.model)
    for name, value in summary(frontend, engine).items():
        print(f"{name.replace('_', ' '):24} {value:4}")
    if options.files:
        for title, calls in (("frontend", frontend), ("engine", engine)):
            print(f"\n{title}: functions, file")
            for file, count in Counter(
                file for file, _, _ in sorted(calls, key=lambda c: c[2])
            ).items():
                print(f"{count:4}  {file}")


if __name__ == "__main__":
    main()
