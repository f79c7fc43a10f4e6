"""Answers questions about a GPU: its name, and what it and its build of PyTorch have.

ROCm builds of PyTorch have `torch.cuda` too, and it means the AMD GPU there. What exists only in
CUDA builds, or means something else in ROCm builds, is asked here and in no other file. PTX is in
`kernels/triton/assembly.py`, and CUDA C++ in `kernels/cuda`, which only Hopper GPUs run.
"""

from functools import cache
from typing import Any

import torch

# Compute capabilities of NVIDIA GPUs. An AMD GPU has numbers of its own: an MI250 also says (9, 0).
_ADA, _HOPPER = (8, 9), (9, 0)


def is_amd() -> bool:
    """Whether this is a ROCm build of PyTorch."""
    return torch.version.hip is not None


def describe(device: torch.device) -> str:
    """The GPU's name and the version of its platform, such as "AMD Instinct MI300X, ROCm 6.4"."""
    platform = f"ROCm {torch.version.hip}" if is_amd() else f"CUDA {torch.version.cuda}"
    return f"{torch.cuda.get_device_name(device)}, {platform}"


@cache
def is_hopper(device: torch.device) -> bool:
    return not is_amd() and torch.cuda.get_device_capability(device) == _HOPPER


def overlaps_kernels(device: torch.device) -> bool:
    """Whether a Triton kernel can start before the previous one ends (programmatic dependent
    launch).
    """
    return device.type == "cuda" and is_hopper(device)


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether the GPU multiplies float8 numbers of the type e4m3fn. An MI300 has e4m3fnuz, in
    which the same bits mean half the value.
    """
    return not is_amd() and torch.cuda.get_device_capability(device) >= _ADA


@cache
def has_scaled_gemm(device: torch.device) -> bool:
    """Whether cuBLASLt multiplies float8 matrices with a scale per row and column."""
    return not is_amd() and torch.cuda.get_device_capability(device) >= _HOPPER


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def prefer_cublaslt() -> None:
    """Lets PyTorch use cuBLASLt instead of cuBLAS. A ROCm build keeps its own choice."""
    if torch.version.cuda is not None:
        torch.backends.cuda.preferred_blas_library("cublaslt")


def keep_sums_whole() -> None:
    """Forbids cuBLASLt to compute a sum in several parts (split-K), which would depend on the
    number of rows. cuBLAS itself cannot be told so.
    """
    prefer_cublaslt()
    whole: Any = (False, False)  # no sums of parts in 16 bits, and no parts
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = whole
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = whole


def num_stages(asked: int) -> int:
    """The pipeline stages of a kernel. An AMD GPU has 64 KB of shared memory, a third of what an
    NVIDIA GPU has, so it gets two, which need one buffer.
    """
    return min(asked, 2) if is_amd() else asked
