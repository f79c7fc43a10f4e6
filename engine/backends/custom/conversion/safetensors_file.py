"""Writing a safetensors file: the length of a JSON header, the header, then data without gaps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from engine.backends.custom.conversion.stored import Bytes, StoredTensor

_ALIGNMENT = 8


def safetensors_bytes(
    tensors: Sequence[StoredTensor], metadata: Mapping[str, str]
) -> Iterator[Bytes]:
    """The whole file, in pieces. `metadata` goes into the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    for tensor in tensors:
        yield from tensor.pieces()
