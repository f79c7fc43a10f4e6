"""The entry point of the `engine` command.

The engine process of `engine serve` and `engine node join` is started before Typer is imported.
Importing Typer and pydantic takes half as long as the engine process needs for its own imports. So
both processes import in parallel.
"""

import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from engine.core.sandbox.exhaustion import limit_too_small, what_ran_out
from engine.ipc.engine_process import EngineProcess

_waiting: list[EngineProcess] = []


def main() -> None:
    # Without this variable, pydantic searches the metadata of every installed package for plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        _start_engine(sys.argv[1:])
    except OSError as error:
        _refuse(what_ran_out(error) or f"The engine's process can't be started: {error}")
    from engine.cli.commands import run_command

    run_command()


def take_engine() -> EngineProcess:
    """Return the engine process that `main` started, or start a new one. Garbage is collected from
    now on.
    """
    gc.enable()
    return _waiting.pop() if _waiting else _started()


def _start_engine(arguments: Sequence[str]) -> None:
    """Start an engine process if the command is `serve` or `node join`. If the command does not use
    the engine process after all, the engine process exits together with this one.
    """
    runs_engine = arguments[:1] == ["serve"] or arguments[:2] == ["node", "join"]
    if runs_engine and not {"--help", "-h"} & set(arguments):
        if (problem := limit_too_small()) is not None:
            _refuse(problem)
        gc.disable()  # imports create hardly any garbage
        _waiting.append(_started())


def _refuse(problem: str) -> NoReturn:
    print("error:", problem, file=sys.stderr)
    sys.exit(1)


def _started() -> EngineProcess:
    # Without this variable, numpy starts one BLAS thread per core, in this process and in the
    # engine process. These threads would only waste CPU time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return EngineProcess()


if __name__ == "__main__":
    # Not the `main` of this run of the module: commands import the module by its name, and take the
    # engine process from there.
    from engine.cli.main import main as named_main

    named_main()
