"""Compiles Triton kernels in parallel, ahead of their first launch.

Triton compiles a kernel when it is first launched, and the launch waits for it. Here a launch of a
kernel that is not compiled yet starts its compilation in another thread, and the launch is left
out. The compiler does not hold Python's global lock, so the threads use several CPUs. Compiled
kernels are kept in Triton's cache on disk, where the next start finds them.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MAX_THREADS = 16
_FILLED = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


class _Zeros(TorchFunctionMode):
    """New tensors are filled with zeros. So an index that a kernel would have computed is valid,
    although the kernel was not launched.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FILLED.get(func, func)(*args, **(kwargs or {}))


def _use(device: torch.device) -> None:
    """Makes a GPU the current one of this thread."""
    if device.index is not None:
        torch.cuda.set_device(device)


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Within this context, kernels that are not compiled yet are compiled instead of launched. At
    its end, all of them are compiled. Results that are computed within are not meaningful.
    """
    from triton import knobs

    started: dict[tuple[str, ...], Future[Any]] = {}

    def start(
        *, key: str, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **_: Any
    ) -> bool:
        """Triton's hook before a compilation. If it returns True, nothing is launched."""
        if is_manual_warmup:  # `preload` compiles now
            return False
        if (kernel := (fn.module, fn.name, key)) not in started:
            data = compile["specialization_data"]
            started[kernel] = pool.submit(fn.jit_function.preload, data)
        return True

    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, initializer=_use, initargs=(device,)) as pool:
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = start
        try:
            with _Zeros():
                yield
            for future in started.values():
                future.result()
        finally:
            knobs.runtime.jit_cache_hook = before
