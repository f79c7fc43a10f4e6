"""Starts the engine process of `engine serve` before the command line is parsed.

Parsing imports Typer and pydantic, which takes half as long as the engine process needs for its own
imports. The two run in parallel.
"""

import os
from collections.abc import Sequence

from engine.backends.custom.ipc.engine_process import EngineProcess

_waiting: list[EngineProcess] = []


def start_engine(arguments: Sequence[str]) -> None:
    """Start an engine process if the command will need one. If it does not, the process exits with
    this one.
    """
    if arguments[:1] == ["serve"] and "--help" not in arguments:
        _waiting.append(_started())


def take_engine() -> EngineProcess:
    """The engine process that was started before, or a new one."""
    return _waiting.pop() if _waiting else _started()


def _started() -> EngineProcess:
    # Numpy would start one BLAS thread per core, here and in the engine; these threads only spin.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return EngineProcess()
