"""From nothing to the first answer: a fresh clone or a wheel, a new home folder, one question.

    python -m benchmarks.first_answer [--runs 2] [--wheel dist/engine-*.whl] [--repository .]

A run makes an empty folder, installs, fetches the default model, serves it and asks it a question.
It prints the seconds of each part, and the CPU seconds of all processes together: on a machine that
does other work, only these compare. Times include the network.
"""

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from engine.core.store.catalogue import DEFAULT_MODEL

QUESTION = "How many days are in a week?"
LIMIT_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--wheel", type=Path, help="install this instead of a clone")
    parser.add_argument("--repository", default=".", help="what to clone")
    given = parser.parse_args()
    for number in range(1, given.runs + 1):
        with tempfile.TemporaryDirectory(prefix="first-answer-") as folder:
            run(number, Path(folder), given.wheel, given.repository)


def run(number: int, folder: Path, wheel: Path | None, repository: str) -> None:
    variables = {**os.environ, "HOME": str(folder / "home")}
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "VIRTUAL_ENV", "PYTHONPATH"):
        variables.pop(name, None)
    (folder / "home").mkdir()
    clone = folder / "clone"
    if wheel is None:
        subprocess.run(["git", "clone", "-q", repository, clone], check=True)
        install, engine = [["make", ".venv/.serve"]], clone / ".venv/bin/engine"
    else:
        clone.mkdir()
        engine = clone / "venv/bin/engine"
        installed = [engine.parent / "python", "-m", "pip", "install", "-q", wheel.resolve()]
        install = [[sys.executable, "-m", "venv", "venv"], list(map(str, installed))]
    before, parts = cpu_seconds(), {}
    started = time.monotonic()
    for command in install:
        timed(parts, "install", command, clone, variables)
    timed(parts, "pull", [str(engine), "pull", DEFAULT_MODEL], clone, variables)
    began = time.monotonic()
    answer = first_answer(engine, clone, variables)
    parts["serve and answer"] = time.monotonic() - began
    whole = time.monotonic() - started
    shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    print(f"run {number}: {whole:.1f} s ({shown}), CPU {cpu_seconds() - before:.1f} s: {answer!r}")


def timed(
    parts: dict[str, float], name: str, command: list[str], cwd: Path, variables: dict[str, str]
) -> None:
    began = time.monotonic()
    subprocess.run(command, cwd=cwd, env=variables, check=True, timeout=LIMIT_S, stdout=sys.stderr)
    parts[name] = parts.get(name, 0.0) + time.monotonic() - began


def first_answer(engine: Path, cwd: Path, variables: dict[str, str]) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(engine), "serve", DEFAULT_MODEL, "--port", str(port)]
    server = subprocess.Popen(command, cwd=cwd, env=variables, stdout=sys.stderr)
    try:
        return ask(f"http://127.0.0.1:{port}/v1/chat/completions", server)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def ask(url: str, server: "subprocess.Popen[bytes]") -> str:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": DEFAULT_MODEL, "messages": messages, "temperature": 0, "max_tokens": 32}
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and server.poll() is None:
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
                return str(json.load(reply)["choices"][0]["message"]["content"])
        except OSError:  # it does not listen, or loads the model
            time.sleep(0.1)
    raise SystemExit("the server did not answer; see its output above")


def cpu_seconds() -> float:
    """Of all processes that ended, with those that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
