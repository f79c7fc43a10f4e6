"""Host arrays to device tensors, without waiting.

On CUDA every array goes through fresh pinned memory, so that its copy is queued behind earlier work
and the host goes on; PyTorch's pinned allocator does not reuse the memory before the copy is done.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Shares memory with the array on the CPU: what the seam hands over is never written again."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Start copying to the host. Valid only after an event recorded behind this call has passed."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
