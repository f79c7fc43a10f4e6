"""The memory of a training process: its limit, and whether the model fits at all."""

import ctypes
import gc
import resource

import psutil
import torch

from engine.core.errors import ResourceError
from engine.core.memory import MIB, memory_room
from engine.finetuning.plan import TrainingPlan

_M_MMAP_THRESHOLD = -3  # of mallopt
# In messages of PyTorch and CUDA that are no `OutOfMemoryError`.
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")


def limit_memory(plan: TrainingPlan, device: torch.device) -> None:
    """Make allocations beyond the plan's limit fail."""
    if plan.memory_bytes is None:
        return
    if device.type == "cpu":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # of glibc
            # Tensors get mappings of their own. In the heap, gaps of freed ones would count.
            libc.mallopt(_M_MMAP_THRESHOLD, MIB)
        resource.setrlimit(resource.RLIMIT_DATA, (plan.memory_bytes, plan.memory_bytes))
        return
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, plan.memory_bytes / total), device)


def check_room(plan: TrainingPlan, device: torch.device, num_params: int) -> None:
    """Raise `ResourceError` if not even the weights fit, before they are loaded."""
    on_cpu = device.type == "cpu"
    room = memory_room()
    free = room.plannable if on_cpu else torch.cuda.mem_get_info(device)[0]
    needed = num_params * (4 if on_cpu else 2)
    own = getattr(psutil.Process().memory_info(), "data", 0) if on_cpu else 0
    if plan.memory_bytes is not None and plan.memory_bytes < own + needed:
        raise ResourceError(
            f"training needs more than {(own + needed) / MIB:,.0f} MiB for this model, and may use "
            f"{plan.memory_bytes / MIB:,.0f} MiB (finetuning.memory_mb)"
        )
    if free < needed:
        more = "; finetuning.memory_mb makes the server leave room for training"
        if on_cpu:
            more = f" ({room.bound})" if room.bound else ""
        raise ResourceError(
            f"the weights alone need {needed / MIB:,.0f} MiB, and {free / MIB:,.0f} MiB of {device}"
            f" are free{more}"
        )


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def release_memory() -> None:
    """Return what freed tensors still occupy."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU
