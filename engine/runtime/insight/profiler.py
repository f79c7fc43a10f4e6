"""What a framework implements so that its kernels can be timed, in a server or in a profile."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class KernelTimer(Protocol):
    """A runner that can time its kernels while it serves."""

    def time_kernels(self, on: bool) -> None: ...

    def kernel_seconds(self) -> dict[str, float]:
        """The seconds of the last step by kind of kernel. Empty if no step was timed."""
        ...


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The total time of all calls of one kernel. On a CPU, this is the time of one op or plan step,
    summed over all layers.
    """

    name: str
    calls: int
    seconds: float


class Profiler(Protocol):
    """A framework's own profiler. It records while it is entered as a context manager."""

    def barrier(self, name: str) -> AbstractContextManager[None]:
        """Wraps a runner call. On exit, it waits until the device has finished the call's work."""
        ...

    def span(self, name: str) -> AbstractContextManager[None]:
        """Marks a runner call in the recording."""
        ...

    def __enter__(self) -> "Profiler": ...

    def __exit__(self, *error: object) -> None: ...

    def kernels(self) -> list[KernelTime]:
        """The recorded kernels, slowest first."""
        ...

    def write_trace(self, path: Path) -> None:
        """Write the recording as a Chrome trace."""
        ...
