"""Profiles the calls of a PyTorch runner with PyTorch's profiler. It measures kernels on a GPU, and
PyTorch operations on a CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.backends.custom.runtime.model_runner import KernelTime

SPAN = "engine: "  # in a trace, names of runner calls have this prefix; names of kernels do not
_US = 1e-6


class TorchProfiler:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)

    @contextmanager
    def barrier(self, name: str) -> Iterator[None]:
        yield
        self._synchronize()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with record_function(SPAN + name):
            yield

    def __enter__(self) -> "TorchProfiler":
        self._profile.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._synchronize()
        self._profile.stop()

    def kernels(self) -> list[KernelTime]:
        on_gpu = self._device.type == "cuda"
        wanted = "CUDA" if on_gpu else "CPU"
        found = [
            KernelTime(
                event.key,
                event.count,
                _US * (event.self_device_time_total if on_gpu else event.self_cpu_time_total),
            )
            for event in self._profile.key_averages()
            if event.device_type.name == wanted and not event.key.startswith(SPAN)
        ]
        return sorted((each for each in found if each.seconds), key=lambda each: -each.seconds)

    def write_trace(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
