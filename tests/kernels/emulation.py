"""Runs a CUDA kernel without a GPU: a C++ compiler builds its source with `emulated.h` in the place
of `hopper.cuh`.
"""

import ctypes
import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.torch.kernels.cuda import library

HEADER = Path(__file__).parent / "emulated.h"
KERNELS = Path(library.__file__).parent
OPTIONS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-w")


class Emulated:
    """Stands in for a kernel that is loaded on a GPU. Its source is in `files`."""

    def __init__(
        self, kernel: str, files: Sequence[str], sizes: Mapping[str, int], folder: Path
    ) -> None:
        sources = (HEADER, *(KERNELS / name for name in ("ring.cuh", *files)))
        defined = [f"#define {key} {value}" for key, value in sizes.items()]
        launch = (
            'extern "C" void launch(int blocks, int threads, void** given) {'
            "if (threads != THREADS) std::abort();"
            f"run_kernel(blocks, threads, {kernel}, given); }}"
        )
        source = "\n".join([*defined, *(file.read_text() for file in sources), launch])
        path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
        if not path.exists():
            path.with_suffix(".cpp").write_text(source)
            command = ("g++", *OPTIONS, "-o", str(path), str(path.with_suffix(".cpp")))
            subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(path))

    def launch(
        self, blocks: int, threads: int, arguments: Sequence[Any], *, overlaps: bool = False
    ) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._library.launch(blocks, threads, pointers)
