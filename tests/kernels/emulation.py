"""Runs a CUDA kernel without a GPU: a C++ compiler builds its source with `emulated.h` in the place
of `hopper.cuh`.
"""

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.torch.kernels.cuda import decode

HEADER = Path(__file__).parent / "emulated.h"
KERNELS = Path(decode.__file__).parent
OPTIONS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-w")


class Emulated:
    """Stands in for a kernel that is loaded on a GPU."""

    def __init__(self, config: decode.DecodeConfig, dtype: torch.dtype, folder: Path) -> None:
        sizes = decode.sizes(config, dtype)
        files = (HEADER, *(KERNELS / name for name in ("ring.cuh", "decode.cuh", "decode.cu")))
        defined = [f"#define {key} {value}" for key, value in sizes.items()]
        launch = (
            'extern "C" void launch(int blocks, int threads, void** given) '
            "{ run_kernel(blocks, threads, decode_rows, given); }"
        )
        source = "\n".join([*defined, *(file.read_text() for file in files), launch])
        path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
        if not path.exists():
            path.with_suffix(".cpp").write_text(source)
            command = ("g++", *OPTIONS, "-o", str(path), str(path.with_suffix(".cpp")))
            subprocess.run(command, check=True)
        self._library, self._threads = ctypes.CDLL(str(path)), config.threads

    def launch(
        self, blocks: int, threads: int, arguments: Sequence[Any], *, overlaps: bool = False
    ) -> None:
        assert threads == self._threads
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._library.launch(blocks, threads, pointers)
