"""Opens the files of an adapter, and checks them before a server uses them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.adapters.gguf_lora import read_gguf_lora
from engine.adapters.matrices import Adapter, StoredAdapter, fitted
from engine.adapters.peft import CONFIG_NAME, WEIGHTS_NAME, read_peft
from engine.architectures.base import ModelConfig
from engine.core.errors import ModelError, ModelFormatError
from engine.weights.files import refuse_code_formats

DEFAULT_MAX_RANK = 256


def open_adapter(path: Path, config: ModelConfig, max_rank: int = DEFAULT_MAX_RANK) -> Adapter:
    """Open a PEFT folder or a GGUF file, for a model with this config."""
    return fitted(read_adapter(path), config, max_rank)


def read_adapter(path: Path) -> StoredAdapter:
    """Read the files of an adapter, whatever its base model is."""
    if not path.exists():
        raise ModelError(f"there is no adapter at {path}")
    if path.is_dir():
        stored = read_peft(path)
    else:
        refuse_code_formats(path, b"")
        if path.suffix != ".gguf":
            raise ModelFormatError(
                f"{path.name}: an adapter is a .gguf file, or a folder with {CONFIG_NAME} and "
                f"{WEIGHTS_NAME}"
            )
        stored = read_gguf_lora(path)
    if not stored.pairs and not stored.whole:
        raise ModelFormatError(f"{stored.where}: the adapter changes no weight")
    for pair in stored.pairs:
        if not (np.isfinite(pair.a).all() and np.isfinite(pair.b).all()):
            raise ModelFormatError(
                f"{stored.where}: the matrices for '{pair.name}' hold NaN or infinity"
            )
    for name, values in stored.whole.items():
        if not np.isfinite(values).all():
            raise ModelFormatError(f"{stored.where}: '{name}' holds NaN or infinity")
    return stored


def validate_adapter(path: Path, passed: Callable[[], None]) -> None:
    """Check the files of an adapter. Raises if they are invalid."""
    read_adapter(path)
