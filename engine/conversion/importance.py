"""Importance matrices: for each input column of a matmul, the mean square of its activations.

The quantizers weight the error of a column by its importance. Files have llama.cpp's format: a GGUF
file with the sums of squares `NAME.in_sum2` and the number of tokens `NAME.counts`.
"""

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.conversion.gguf_writer import gguf_bytes
from engine.conversion.stored import stored_array
from engine.core.errors import ConfigError, ModelFormatError
from engine.weights.gguf import open_gguf

Floats = NDArray[np.float32]
Sums = Mapping[str, tuple[Floats, int]]  # by GGUF name: sums of squares, and number of tokens
_SUMS, _COUNTS = ".in_sum2", ".counts"


def write_importance(path: Path, sums: Sums, text: str, chunks: int, chunk_tokens: int) -> None:
    """Write the file. `text` names the text that the activations come from."""
    if path.exists():
        raise ConfigError(f"{path} is there already; remove it, or choose another name")
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": [text],
        "imatrix.chunk_count": chunks,
        "imatrix.chunk_size": chunk_tokens,
    }
    tensors = []
    for name, (squares, count) in sums.items():
        tensors.append(stored_array(squares[None], f"{name}{_SUMS}"))
        tensors.append(stored_array(np.full((1, 1), count, np.float32), f"{name}{_COUNTS}"))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            for piece in gguf_bytes(metadata, tensors):
                file.write(piece.data)
        os.rename(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_importance(path: Path) -> dict[str, Floats]:
    """The importance of the columns of each matrix, by its GGUF name: (experts or 1, columns)."""
    with closing(open_gguf(path)) as file:
        if file.metadata.get("general.type") != "imatrix":
            raise ModelFormatError(f"{path.name} is no importance matrix in GGUF format")
        found = {}
        for name, tensor in file.tensors.items():
            base = name.removesuffix(_SUMS)
            if base == name:
                continue
            counts = file.tensors.get(f"{base}{_COUNTS}")
            if counts is None:
                raise ModelFormatError(f"{path.name}: '{name}' has no '{base}{_COUNTS}'")
            sums, tokens = tensor.numpy(), counts.numpy().reshape(-1, 1)
            sums = sums.reshape(-1, tensor.shape[-1])
            if len(sums) != len(tokens):
                raise ModelFormatError(f"{path.name}: '{name}' has {len(tokens)} counts")
            if not (np.isfinite(sums).all() and (sums >= 0).all() and (tokens >= 0).all()):
                raise ModelFormatError(f"{path.name}: '{name}' has negative or infinite numbers")
            # An expert that no token was routed to weights all columns alike.
            found[base] = np.where(tokens > 0, sums / np.maximum(tokens, 1), np.float32(1))
    return found
