"""Makes a folder unusable under a running server, in each way that a disk can fail, and restores
it.
"""

import contextlib
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from tests.scoreboard.served_engine import Served


class NotPossibleError(Exception):
    """This fault can't be produced on this machine."""


Trouble = Callable[[Served, Path, random.Random], AbstractContextManager[None]]


@contextlib.contextmanager
def full(served: Served, folder: Path, chooser: random.Random) -> Iterator[None]:
    """Limit the size of the server's files, which has the effect of a full disk."""
    hard = resource.RLIM_INFINITY
    pids = [each.pid for each in served.processes()]
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


@contextlib.contextmanager
def deleted(served: Served, folder: Path, chooser: random.Random) -> Iterator[None]:
    """Delete the folder at once. Deleting file by file would race with the server's writing."""
    doomed = folder.rename(folder.with_name(f"{folder.name}-deleted"))
    shutil.rmtree(doomed, ignore_errors=True)
    yield


@contextlib.contextmanager
def corrupted(served: Served, folder: Path, chooser: random.Random) -> Iterator[None]:
    """Overwrite some bytes of every file, at its beginning and elsewhere."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("r+b") as file:
                for place in (0, chooser.randrange(path.stat().st_size)):
                    file.seek(place)
                    file.write(chooser.randbytes(100))
    yield


@contextlib.contextmanager
def read_only(served: Served, folder: Path, chooser: random.Random) -> Iterator[None]:
    """Make the folder read-only: by a mount for root, whom permissions don't stop. Mounting may not
    be allowed.
    """
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    if subprocess.run(["mount", "--bind", folder, folder], stderr=subprocess.DEVNULL).returncode:
        raise NotPossibleError
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


TROUBLES: tuple[Trouble, ...] = (full, deleted, corrupted, read_only)
