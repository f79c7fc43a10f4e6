"""Fault injection points: a test can make one fail, sleep or end the process.

`hit("forward")` costs one comparison and does nothing unless faults are armed: by a test in its own
process (`planned`), or by an environment variable read once at process start. That variable alone
is refused; a second one must confirm that this server may be broken.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from engine.core.errors import ConfigError

PLAN_VARIABLE = "ENGINE_FAULTS"
GUARD_VARIABLE = "ENGINE_FAULTS_GUARD"
GUARD = "this server is here to be broken"
EXIT_STATUS = 70

# In the order in which a request passes them.
POINTS = (
    "validate",  # a body was decoded
    "template",  # a chat is rendered to a prompt
    "tokenize",  # subject: the text
    "check_grammar",  # a grammar is test-compiled outside the engine; subject: its text
    "submit",  # a request leaves the frontend; subject: token ids
    "load",  # the engine process loads a model
    "intake",  # a request reaches the engine loop; subject: token ids
    "compile",  # a grammar is compiled; subject: its text
    "schedule",
    "allocate",  # blocks for one sequence; subject: its token ids
    "forward",  # subject: the step's token ids
    "sample",
    "wait",
    "update",  # a row's result is processed; subject: its sequence's token ids
    "nonfinite",  # "mark": treat the row as non-finite; subject: its sequence's token ids
    "publish",  # blocks enter the prefix cache; subject: their token ids
    "detokenize",
    "parse",
    "format",
    "database",
    "upload",
    "keep_file",  # a file cached for the next start
)
Action = Literal["raise", "memory", "disk", "sleep", "exit", "mark"]
P = ParamSpec("P")
T = TypeVar("T")


class FaultError(RuntimeError):
    """An unexpected exception, for tests."""


@dataclass(frozen=True)
class Fault:
    """Fails `times` hits of a point, from the `at`-th on. With `within`, only hits whose subject
    contains it count.
    """

    point: str
    action: Action = "raise"
    at: int = 1
    times: int = 1
    within: str | int | None = None
    seconds: float = 0.0  # duration of action "sleep"


class _Plan:
    """Armed faults and their hit counts. Thread-safe."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            if fault.point not in POINTS:
                raise ConfigError(f"{PLAN_VARIABLE}: there is no point {fault.point!r}")
        self._counts = [(fault, [0]) for fault in faults]
        self._lock = threading.Lock()
        self.num_strikes = 0

    def strike(self, point: str, subject: Container[Any] | None) -> bool:
        due: list[Fault] = []
        with self._lock:
            for fault, count in self._counts:
                if fault.point != point:
                    continue
                if fault.within is not None and (subject is None or fault.within not in subject):
                    continue
                count[0] += 1
                if fault.at <= count[0] < fault.at + fault.times:
                    due.append(fault)
            self.num_strikes += len(due)
        for fault in due:
            _act(fault)
        return bool(due)


_plan: _Plan | None = None


def hit(point: str, subject: Container[Any] | None = None) -> bool:
    """True if a "mark" fault fires; other actions fail, sleep or exit here."""
    return _plan is not None and _plan.strike(point, subject)


def is_armed() -> bool:
    """Asked once by per-token code, instead of a `hit` per token."""
    return _plan is not None


def wrap(point: str, function: Callable[P, T]) -> Callable[P, T]:
    """A function that hits the point first; `function` itself when nothing is armed."""
    if _plan is None:
        return function

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        hit(point)
        return function(*args, **kwargs)

    return wrapped


@contextmanager
def planned(*faults: Fault) -> Iterator[_Plan]:
    """Arm faults in this process until the block ends."""
    global _plan
    before, plan = _plan, _Plan(faults)
    _plan = plan
    try:
        yield plan
    finally:
        _plan = before


def arm(environ: Mapping[str, str] = os.environ) -> None:
    """Arm what the environment asks for. Called once at process start."""
    global _plan
    text = environ.get(PLAN_VARIABLE)
    if text is None:
        return
    if environ.get(GUARD_VARIABLE) != GUARD:
        raise ConfigError(
            f"{PLAN_VARIABLE} makes a server fail on purpose and is for its tests alone;"
            " unset it to start"
        )
    import msgspec

    try:
        _plan = _Plan(msgspec.json.decode(text, type=list[Fault]))
    except msgspec.DecodeError as error:
        raise ConfigError(f"{PLAN_VARIABLE}: {error}") from error


def environment(*faults: Fault) -> dict[str, str]:
    """Environment variables that arm these faults in a child process."""
    import msgspec

    return {PLAN_VARIABLE: msgspec.json.encode(faults).decode(), GUARD_VARIABLE: GUARD}


def _act(fault: Fault) -> None:
    if fault.action == "raise":
        raise FaultError(f"a fault was planned at {fault.point}")
    if fault.action == "memory":
        raise MemoryError(f"a fault was planned at {fault.point}")
    if fault.action == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if fault.action == "sleep":
        time.sleep(fault.seconds)
    if fault.action == "exit":
        os._exit(EXIT_STATUS)
