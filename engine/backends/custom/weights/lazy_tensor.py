"""A tensor of a checkpoint whose bytes are not touched until somebody asks for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.weights.files import FileBytes


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """One named tensor in a mapped file. `shape` is row-major: (out, in) for a matrix.

    `dtype` is the storage type's name as GGUF spells it ("F32", "BF16", "Q4_1", ...). Rows are
    contiguous in the stored bytes for every type, so that rows can be taken, or reordered, without
    decoding them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    _view: Callable[[], NDArray[np.uint8]]
    _decode: Callable[[NDArray[np.uint8], tuple[int, ...]], NDArray[np.float32]]

    def raw(self) -> NDArray[np.uint8]:
        """The stored bytes as a read-only flat view of the mapping; no copy."""
        return self._view()

    def numpy(self) -> NDArray[np.float32]:
        """The values as float32. Decodes (and so touches) the whole tensor."""
        return self._decode(self.raw(), self.shape)


class Checkpoint(Protocol):
    """An opened set of weight files: names to lazy tensors. Closing unmaps; views must be gone by
    then.
    """

    @property
    def tensors(self) -> dict[str, LazyTensor]: ...

    @property
    def format(self) -> str:
        """ "gguf" or "safetensors": which of an architecture's name maps applies."""
        ...

    @property
    def files(self) -> list[FileBytes]: ...

    def close(self) -> None: ...
