"""Copies host arrays to device tensors and back, without waiting.

On CUDA every array goes through fresh pinned memory, so its copy is queued behind earlier work and
the host continues. PyTorch's pinned allocator does not reuse the memory before the copy is done.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """On a CPU the tensor shares the array's memory: the runtime never modifies step arrays."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Starts a copy to the host. Valid only after an event recorded after this call has passed."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
