"""Compiles CUDA C++ at run time with NVRTC, caches the result on disk and launches kernels.

NVRTC comes with PyTorch, and the driver library comes with the GPU's driver. Both are called
through `ctypes`. So nothing is compiled at installation, and on a machine without a GPU neither
library is loaded.
"""

import ctypes
import hashlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES and PREFERRED_SHARED_MEMORY_CARVEOUT, a percentage
_MAX_SHARED_BYTES, _SHARED_PERCENT = 8, 9
_ELEMENTS = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLE_128, _PROMOTE_256 = 3, 3
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_OVERLAPS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute. The value is a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Launch(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaError(RuntimeError):
    """A call of the CUDA driver or of the NVRTC compiler failed."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> ctypes.CDLL:
    packages = Path(torch.__file__).parents[1] / "nvidia"
    found = sorted(packages.glob("**/libnvrtc.so.*"))
    return ctypes.CDLL(str(found[0]) if found else "libnvrtc.so")


def _check(status: int, call: str) -> None:
    if status:
        raise CudaError(f"{call} answered {status}")


def compiled(source: str, target: str) -> bytes:
    """The machine code of `source` for the GPU architecture `target`, such as "sm_90a". The source
    is compiled once. Later calls read the machine code from a cache on disk.
    """
    key = hashlib.sha256(f"{target}\n{source}".encode()).hexdigest()[:32]
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    path = folder / f"engine-{key}.cubin"
    if path.exists():
        return path.read_bytes()
    code = _compile(source, target)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(code)
    unfinished.replace(path)
    return code


def _compile(source: str, target: str) -> bytes:
    nvrtc, program = _compiler(), ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    )
    _check(created, "nvrtcCreateProgram")
    options = [f"--gpu-architecture={target}".encode(), b"--std=c++17"]
    status = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    if status:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaError(f"nvrtcCompileProgram answered {status}: {log.value.decode()}")
    _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
    code = ctypes.create_string_buffer(size.value)
    _check(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


class Function:
    """A kernel that is loaded on the GPU. Each thread block gets `shared_bytes` bytes of dynamic
    shared memory.
    """

    def __init__(self, code: bytes, name: str, shared_bytes: int) -> None:
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
        found = driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode())
        _check(found, "cuModuleGetFunction")
        for attribute, value in ((_MAX_SHARED_BYTES, shared_bytes), (_SHARED_PERCENT, 100)):
            changed = driver.cuFuncSetAttribute(self._function, attribute, value)
            _check(changed, "cuFuncSetAttribute")
        self._shared_bytes = shared_bytes

    def launch(
        self, blocks: int, threads: int, arguments: Sequence[Any], *, overlaps: bool = False
    ) -> None:
        """Launches the kernel on PyTorch's current stream. `arguments` are `ctypes` values. With
        `overlaps`, the kernel may start before the previous one ends, and waits for it by itself.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        config = _Launch((blocks, 1, 1), (threads, 1, 1), self._shared_bytes, stream)
        attribute = _Attribute(_OVERLAPS, 0, 1)
        config.attributes, config.num_attributes = ctypes.pointer(attribute), int(overlaps)
        status = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        _check(status, "cuLaunchKernelEx")


def tensor_map(tensor: Tensor, box: Sequence[int]) -> ctypes.Array[ctypes.c_char]:
    """Makes a TMA descriptor, with which kernels copy boxes of a tensor to swizzled shared memory.
    Elements of a box that are outside the tensor are copied as zeros.
    """
    room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    start = -ctypes.addressof(room) % _MAP_ALIGNMENT
    made = (ctypes.c_char * _MAP_BYTES).from_buffer(room, start)
    rank, size = tensor.dim(), tensor.element_size()
    status = _driver().cuTensorMapEncodeTiled(
        made,
        _ELEMENTS[tensor.dtype],
        rank,
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * rank)(*reversed(tensor.shape)),
        (ctypes.c_uint64 * (rank - 1))(*(size * step for step in reversed(tensor.stride()[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLE_128,
        _PROMOTE_256,
        0,
    )
    _check(status, "cuTensorMapEncodeTiled")
    return made
