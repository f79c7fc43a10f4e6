"""The oldest versions of other engines that have no known way in for whoever can reach them.

Raise one when a fix is published. An older one is warned of, not refused: it may be all that runs
on a machine, and only this server talks to it.
"""

import logging
import re
import tempfile
from collections.abc import Mapping

from engine.backends.process import ChildProcess
from engine.core.utils.processes import start_child

log = logging.getLogger(__name__)

MINIMUM = {"vllm": "0.23.1", "sglang": "0.5.0"}
LOOK_UP = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
LOOK_UP_TIMEOUT_S = 20.0


async def warn_if_old(package: str, interpreter: str, environment: Mapping[str, str]) -> None:
    """Ask the environment where it is installed; what is not installed is told later, by its own
    start.
    """
    found = await _installed(package, interpreter, environment)
    if found is not None and _parts(found) < _parts(MINIMUM[package]):
        log.warning(
            "%s %s has known security holes that %s has not: update it in the environment of %s",
            package,
            found,
            MINIMUM[package],
            interpreter,
        )


async def _installed(package: str, interpreter: str, environment: Mapping[str, str]) -> str | None:
    with tempfile.TemporaryFile() as output:
        argv = [interpreter, "-c", LOOK_UP, package]
        try:
            child = ChildProcess(start_child(argv, (), env=environment, output=output.fileno()))
        except OSError:
            return None
        try:
            status = await child.stop(LOOK_UP_TIMEOUT_S)
        finally:
            child.kill()
        output.seek(0)
        lines = output.read().decode(errors="replace").split()
    return lines[-1] if status == 0 and lines else None


def _parts(version: str) -> tuple[int, ...]:
    """The numbers that it begins with; what comes after them does not count."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    return tuple((numbers + [0, 0, 0])[:3])
