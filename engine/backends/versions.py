"""The oldest versions of other engines that have no known way in for whoever can reach them.

Raise one when a fix is published. An older one is warned of, not refused: it may be all that runs
on a machine, and only this server talks to it.
"""

import logging
import re
import subprocess
from collections.abc import Mapping

log = logging.getLogger(__name__)

MINIMUM = {"vllm": "0.23.1", "sglang": "0.5.0"}
LOOK_UP = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
LOOK_UP_TIMEOUT_S = 20.0


def warn_if_old(package: str, interpreter: str, environment: Mapping[str, str]) -> None:
    """Ask the environment where it is installed; what is not installed is told later, by its own
    start.
    """
    found = _installed(package, interpreter, environment)
    if found is not None and _parts(found) < _parts(MINIMUM[package]):
        log.warning(
            "%s %s has known security holes that %s has not: update it in the environment of %s",
            package,
            found,
            MINIMUM[package],
            interpreter,
        )


def _installed(package: str, interpreter: str, environment: Mapping[str, str]) -> str | None:
    try:
        done = subprocess.run(
            [interpreter, "-c", LOOK_UP, package],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOOK_UP_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[-1] if done.returncode == 0 and lines else None


def _parts(version: str) -> tuple[int, ...]:
    """The numbers that it begins with; what comes after them does not count."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    return tuple((numbers + [0, 0, 0])[:3])
