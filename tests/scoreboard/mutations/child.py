"""The process that reads damaged model files, one after the other, under resource limits.

It is run as a module with the name of a kind of file and a folder. Each input line is the seed of a
case; each output line is its result. A kind is a module with `write(seed, folder)`, which creates
the case and returns the path to read, and `read(path)`, which makes the engine read it.
"""

import json
import re
import resource
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.core.errors import ModelError
from engine.core.sandbox.checkpoint_validation import files_of

SLOW_S = 2.0
HEADROOM_BYTES = 64 << 20
# Far above the limit of a case; it only protects the machine.
MAX_ADDRESS_SPACE = 4 << 30
MAX_OPEN_FILES = 256
MAX_TOLD = 400


def main() -> None:
    kind = import_module(f"tests.scoreboard.mutations.{sys.argv[1]}")
    folder = Path(sys.argv[2])
    for limited, limit in (
        (resource.RLIMIT_AS, MAX_ADDRESS_SPACE),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limited, (limit, limit))
    for path in kind.sound_files(folder):
        kind.read(path)  # warm up, so that no case pays for one-time initialization
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_try(kind, int(line), folder)), flush=True)


def _try(kind: Any, seed: int, folder: Path) -> dict[str, Any]:
    try:
        path = kind.write(seed, folder)
    except Exception as error:
        return {"seed": seed, "not_made": repr(error)}
    allowed = 2 * sum(file.stat().st_size for file in files_of(path) if file.is_file())
    before = _peak_bytes(start_anew=True)
    began = time.monotonic() - _queued_s()
    ending, told = _read(kind, path)
    seconds = time.monotonic() - _queued_s() - began
    over = _peak_bytes() - before - allowed - HEADROOM_BYTES
    return {
        "seed": seed,
        "ending": ending,
        "told": told[:MAX_TOLD],
        "seconds": seconds,
        "bytes_over": max(over, 0),
    }


def _read(kind: Any, path: Path) -> tuple[str, str]:
    try:
        kind.read(path)
    except ModelError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except MemoryError:
        return "filled memory", ""
    except BaseException as error:  # a panic in a Rust library is a BaseException
        return "escaped", f"{type(error).__name__}: {error}"
    return "accepted", ""


def _queued_s() -> float:
    """How long this process was runnable but not running, in seconds."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def _peak_bytes(*, start_anew: bool = False) -> int:
    if start_anew:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


if __name__ == "__main__":
    main()
