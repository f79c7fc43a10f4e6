"""R12: the server itself is killed, without a chance to clean up; nothing may stay behind.

It serves with its own engine and with an external one (a stand-in), which listens on a Unix socket
in a temporary folder. Half of the kills happen under load.
"""

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.served_engine import MODEL, OWN_FOLDERS, Served, served_engine
from tests.scoreboard.streams import Reply, all_begun, ask, completion
from tests.support.fakes.stand_in_engine import FaultFile

NUM_KILLS, NUM_CLIENTS = 10, 8
GONE_WITHIN_S = 5.0
TEMPORARY = ("TMPDIR", "XDG_RUNTIME_DIR")
TOML = """
[backends.own]
kind = "native"
model = "{model}"
[backends.external]
kind = "vllm"
model = "openai-community/gpt2"
env = {{ {env} }}
start_timeout_s = 30.0
[models."{model}"]
backends = ["own"]
[models.outer]
backends = ["external"]
"""


class Traces:
    """What a running server owns, none of which may remain after it was killed."""

    def __init__(self, served: Served, outer: FaultFile) -> None:
        self._served = served
        self._processes = served.processes()
        self._processes += [psutil.Process(pid) for pid in outer.pids if psutil.pid_exists(pid)]
        self._shared = {
            each.path
            for process in self._processes
            for each in process.memory_maps()
            if each.path.startswith("/dev/shm/")
        }

    def processes(self) -> list[str]:
        return [str(each) for each in self._processes if is_alive(each)]

    def sockets(self) -> list[str]:
        paths = Path("/proc/net/unix").read_text().split()
        found = [path for path in paths if path.startswith(str(self._served.folder))]
        with contextlib.suppress(OSError), socket.create_connection(self._served.address, 1):
            found.append(self._served.url)
        return found

    def shared_memory(self) -> list[str]:
        return [path for path in self._shared if os.path.exists(path.removesuffix(" (deleted)"))]

    def files(self) -> list[str]:
        folders = [
            self._served.folder / OWN_FOLDERS[name] for name in ("TMPDIR", "XDG_RUNTIME_DIR")
        ]
        return [str(path) for folder in folders for path in folder.rglob("*") if not path.is_dir()]

    def all(self) -> dict[str, list[str]]:
        return {
            "processes": self.processes(),
            "sockets": self.sockets(),
            "shared_memory": self.shared_memory(),
            "temporary_files": self.files(),
        }


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


async def under_load(served: Served) -> None:
    """Kill the server while it answers clients."""
    replies = [Reply() for _ in range(NUM_CLIENTS)]
    body = completion("Once upon a time", max_tokens=400, stream=True)
    asking = [asyncio.create_task(ask(served, body, reply=reply)) for reply in replies]
    await all_begun(replies)
    os.kill(served.process.pid, signal.SIGKILL)
    await asyncio.gather(*asking)


def left_after_kill(number: int) -> dict[str, list[str]]:
    with served_engine_of_two() as (served, outer):
        traces = Traces(served, outer)
        assert traces.sockets() and traces.files(), "nothing to leave behind"
        if number % 2:
            asyncio.run(under_load(served))
        else:
            os.kill(served.process.pid, signal.SIGKILL)
        until = time.monotonic() + GONE_WITHIN_S
        while any(traces.all().values()) and time.monotonic() < until:
            time.sleep(0.05)
        return traces.all()


@contextlib.contextmanager
def served_engine_of_two() -> Iterator[tuple[Served, FaultFile]]:
    with tempfile.TemporaryDirectory(prefix="scoreboard-outer-") as name:
        folder = Path(name)
        outer = FaultFile(folder)
        env = ", ".join(f'{variable} = "{value}"' for variable, value in outer.env.items())
        config = folder / "engine.toml"
        config.write_text(TOML.format(model=MODEL, env=env), encoding="utf-8")
        with served_engine("--config", str(config), model=None) as served:
            yield served, outer


@figure(
    "R12",
    "SIGKILL of the server, ten times: what is left 5 s later",
    minutes=2,
    limits={
        kind: at_most(0) for kind in ("processes", "sockets", "shared_memory", "temporary_files")
    },
    in_quick=False,
)
def killed_server(run: Run) -> Values:
    left: dict[str, int] = {}
    for number in range(NUM_KILLS):
        for kind, found in left_after_kill(number).items():
            left[kind] = left.get(kind, 0) + len(found)
            if found:
                run.fail(f"kill {number} left {kind}: {found[:3]}")
        run.cases += 1
    return dict(left)
