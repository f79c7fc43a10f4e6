"""Starts the engine process of `engine serve` and `engine node join` early, before the command line
is parsed.

Parsing needs Typer and pydantic. Importing them takes half as long as the engine process needs for
its own imports. With an early start, both processes import in parallel.
"""

import os
from collections.abc import Sequence

from engine.backends.custom.ipc.engine_process import EngineProcess

_waiting: list[EngineProcess] = []


def start_engine(arguments: Sequence[str]) -> None:
    """Start an engine process if the command is `serve` or `node join`. If the command does not use
    the engine process after all, the engine process exits together with this one.
    """
    runs_engine = arguments[:1] == ["serve"] or arguments[:2] == ["node", "join"]
    if runs_engine and not {"--help", "-h"} & set(arguments):
        _waiting.append(_started())


def take_engine() -> EngineProcess:
    """Return the engine process that `start_engine` started, or start a new one."""
    return _waiting.pop() if _waiting else _started()


def _started() -> EngineProcess:
    # Without this variable, numpy starts one BLAS thread per core, in this process and in the
    # engine process. These threads would only waste CPU time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return EngineProcess()
