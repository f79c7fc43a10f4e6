"""The engine's process of `engine serve`, started before the command line is read.

To read that takes Typer, and with it pydantic, half as long as the engine's process needs to import
what it needs; both get ready side by side.
"""

import os
from collections.abc import Sequence

from engine.backends.custom.ipc.engine_process import EngineProcess

_waiting: list[EngineProcess] = []


def start_engine(arguments: Sequence[str]) -> None:
    """If the command will need one. Where it does not, the process ends with this one."""
    if arguments[:1] == ["serve"] and "--help" not in arguments:
        _waiting.append(_started())


def take_engine() -> EngineProcess:
    """The one that was started, or one that starts now."""
    return _waiting.pop() if _waiting else _started()


def _started() -> EngineProcess:
    # numpy would start a BLAS thread for each core, here and in the engine: they only spin.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return EngineProcess()
