"""Copies host arrays to device tensors and back, without waiting.

On CUDA, an array is first copied to new pinned memory. Its copy to the device is then queued behind
earlier work, and the host continues. PyTorch's pinned allocator does not reuse the memory before
the copy is done.
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
    """Starts a copy to the host. The result is valid once an event that is recorded after this call
    has occurred.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
