"""Where tinygrad can run here, and what keeps it from it."""

import ctypes
import re

import psutil
from tinygrad import Device

from engine.backends.custom.frameworks.tinygrad.clang import missing_clang
from engine.backends.custom.runtime.seam import DeviceInfo
from engine.core.errors import ConfigError

NAME = re.compile(r"(cpu|metal|cuda(:\d+)?)")


def find_device(device: str, dtype: str) -> DeviceInfo:
    """Decide "auto": CUDA when tinygrad finds one, else the CPU; float32, as weights are exact."""
    if device == "auto":
        device = "cuda" if _is_there("CUDA") else "cpu"
    open_device(device)
    kind = "float32" if dtype == "auto" else dtype
    if device.startswith("cuda"):
        return DeviceInfo(device, kind, _free_cuda_bytes())
    return DeviceInfo(device, kind, psutil.virtual_memory().available)


def open_device(device: str) -> str:
    """tinygrad's name of a device that is there and can be used."""
    if NAME.fullmatch(device) is None:
        raise ConfigError(f"device '{device}' is unknown; use cpu, cuda, cuda:N or metal")
    problem = missing_clang() if device == "cpu" else None
    if problem is not None:
        raise ConfigError(problem)
    name = Device.canonicalize(device)
    if not _is_there(name):
        raise ConfigError(f"device '{device}' is not there for tinygrad; use cpu")
    return name


def _is_there(name: str) -> bool:
    """Opening is the only way to ask, and each kind of device fails in its own way."""
    try:
        Device[name]
    except Exception:
        return False
    return True


def _free_cuda_bytes() -> int:
    """Of the device that was opened last."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    if status != 0:
        raise ConfigError(f"the CUDA driver does not tell its free memory (error {status})")
    return free.value
