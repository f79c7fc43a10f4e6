"""A memory limit for a server of a figure: a cgroup of its own or, where none can be made, a limit
of each of its processes. As a module, it enters the limit that a variable names, and then runs what
`engine` runs.
"""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.core.memory import MIB, memory_cgroups, num_oom_kills

VARIABLE = "SCOREBOARD_MEMORY_LIMIT"  # the folder of a cgroup, or a number of bytes
MODULE = "tests.scoreboard.limited_server"
# Fills the memory of the cgroup whose folder is its argument, until a process there is killed. It
# is many processes, so that none of them is the largest one, which the kernel would choose. While
# the memory of the killed process is given back, the kernel may kill one more: then one of these.
BALLAST = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "cgroup.procs").write_text("0")
Path("/proc/self/oom_score_adj").write_text("250")  # an engine has 500, a server 0
name = "memory.events" if (folder / "memory.events").exists() else "memory.oom_control"
def kills():
    lines = (folder / name).read_text().splitlines()
    return [line for line in lines if line.startswith("oom_kill ")]
before, held = kills(), []
children = []
while len(children) < 15 and (pid := os.fork()):
    children.append(pid)
is_parent = len(children) == 15
while kills() == before:
    held.append(bytearray(b"x") * (1 << 20))
    time.sleep(0.002)
for pid in children if is_parent else ():
    os.waitpid(pid, 0)
os._exit(0)
"""


@dataclass(frozen=True)
class Limited:
    """A limit of `limit` bytes. Without a folder, each process has it for itself."""

    limit: int
    folder: Path | None

    @property
    def kind(self) -> str:
        if self.folder is None:
            return "RLIMIT_DATA of each process: cgroups can't be made here"
        return "cgroup v2" if (self.folder / "memory.max").exists() else "cgroup v1"

    @property
    def env(self) -> dict[str, str]:
        return {VARIABLE: str(self.limit if self.folder is None else self.folder)}

    def num_kills(self) -> int:
        """How many processes in the cgroup were killed for lack of memory."""
        if self.folder is None:
            return num_oom_kills()
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(FileNotFoundError):
                lines = (self.folder / name).read_text().splitlines()
                return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return 0

    def run_out_of_memory(self) -> None:
        """Fill the memory until the kernel has killed a process. Only for a cgroup."""
        assert self.folder is not None
        subprocess.run([sys.executable, "-c", BALLAST, str(self.folder)], timeout=120, check=False)


@contextlib.contextmanager
def limited(mebibytes: int) -> Iterator[Limited]:
    limit = mebibytes * MIB
    folder = _make_cgroup(limit)
    try:
        yield Limited(limit, folder)
    finally:
        if folder is not None:
            folder.rmdir()


def _make_cgroup(limit: int) -> Path | None:
    """A new cgroup below that of this process, or None if this process may not make one."""
    for parent, is_v2 in memory_cgroups():
        folder = parent / f"scoreboard-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limit))
            return folder
        except OSError:  # v2 counts no memory here
            folder.rmdir()
    return None


def main() -> None:
    from engine.cli.main import main as run

    where = os.environ.pop(VARIABLE)
    if where.isdigit():
        resource.setrlimit(resource.RLIMIT_DATA, (int(where), int(where)))
    else:
        (Path(where) / "cgroup.procs").write_text("0")
    run()


if __name__ == "__main__":
    main()
