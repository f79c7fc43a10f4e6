"""Profiles a native runner. The C++ executor itself measures the seconds of each plan step."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from engine.native.execution.runner import NativeRunner
from engine.runtime.insight.profiler import KernelTime

_US = 1e6
_HOST, _KERNELS = 1, 2  # the two rows of the trace: runner calls, and kernels


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    lane: int
    began_at: float
    seconds: float


class NativeProfiler:
    """Profiles the calls of a native runner. They are synchronous, so `barrier` has nothing to wait
    for. `labels` are the names of the plan steps, in the order of the plan.
    """

    def __init__(self, runner: NativeRunner, labels: Sequence[str]) -> None:
        self._model = runner._model
        self._labels = labels
        self._events: list[Event] = []

    def barrier(self, name: str) -> nullcontext[None]:
        return nullcontext()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        began_at = time.monotonic()
        yield
        ended_at = time.monotonic()
        self._events.append(Event(name, _HOST, began_at, ended_at - began_at))
        if name == "forward":
            self._note_steps(ended_at)

    def __enter__(self) -> "NativeProfiler":
        self._events = []
        self._model.set_timing(True)
        return self

    def __exit__(self, *error: object) -> None:
        self._model.set_timing(False)

    def kernels(self) -> list[KernelTime]:
        totals: dict[str, tuple[int, float]] = {}
        for event in self._events:
            if event.lane == _KERNELS or event.name == "sample":
                calls, seconds = totals.get(event.name, (0, 0.0))
                totals[event.name] = calls + 1, seconds + event.seconds
        found = [KernelTime(name, calls, seconds) for name, (calls, seconds) in totals.items()]
        return sorted(found, key=lambda each: -each.seconds)

    def write_trace(self, path: Path) -> None:
        process = os.getpid()
        began_at = min((event.began_at for event in self._events), default=0.0)
        lanes = [
            {"name": "thread_name", "ph": "M", "pid": process, "tid": lane, "args": {"name": name}}
            for lane, name in ((_HOST, "runner"), (_KERNELS, "kernels"))
        ]
        events = [
            {
                "name": event.name,
                "ph": "X",
                "pid": process,
                "tid": event.lane,
                "ts": _US * (event.began_at - began_at),
                "dur": _US * event.seconds,
            }
            for event in self._events
        ]
        path.write_text(json.dumps({"traceEvents": lanes + events}))

    def _note_steps(self, ended_at: float) -> None:
        """Adds the plan steps of the last `forward` call to the trace. The plan steps ran one after
        another without gaps. The last plan step ended with the call, at `ended_at`.
        """
        spent = self._model.op_seconds()
        began_at = ended_at - sum(spent)
        for label, seconds in zip(self._labels, spent, strict=True):
            self._events.append(Event(label, _KERNELS, began_at, seconds))
            began_at += seconds
