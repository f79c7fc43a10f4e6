"""How a framework tells where the time of a runner's calls went."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All calls of one kernel; on a CPU, of one operation or of one step of every layer."""

    name: str
    calls: int
    seconds: float


class Profiler(Protocol):
    """What a framework knows of its own time. As a context it records."""

    def barrier(self, name: str) -> AbstractContextManager[None]:
        """Around a call of the runner: does not end before the device has done the call's work."""
        ...

    def span(self, name: str) -> AbstractContextManager[None]:
        """Around a call of the runner while recording."""
        ...

    def __enter__(self) -> "Profiler": ...

    def __exit__(self, *error: object) -> None: ...

    def kernels(self) -> list[KernelTime]:
        """Of what was recorded, slowest first."""
        ...

    def write_trace(self, path: Path) -> None:
        """What was recorded as a Chrome trace."""
        ...
