"""Copies host arrays to device tensors and back, without waiting for the device.

For CUDA, an array is first copied to new pinned memory. The copy from there to the device is queued
behind earlier work, and the host continues. PyTorch does not reuse the pinned memory before this
copy is done.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copies an array to the device without waiting. On a CPU, the tensor shares the array's memory
    instead, because the runtime never modifies the arrays of a step.
    """
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Starts a copy to the host and returns the host tensor. Its values are valid once the copy is
    done. The caller records a CUDA event after this call and waits for that event.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
