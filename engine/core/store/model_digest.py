"""Identifies a model by its content, so that two machines can tell whether they have the same one.

Large files are sampled: their size, both ends, and windows in between. Other weights, another
quantization or another tokenizer change what is sampled. Unlike a checksum of the whole file, this
does not detect a few flipped bits; a download is checked by other means.
"""

import hashlib
from pathlib import Path

WINDOW_BYTES = 64 * 1024
NUM_WINDOWS = 64
WHOLE_BYTES = NUM_WINDOWS * WINDOW_BYTES  # files up to this size are read whole
# The files of a folder that decide what a model computes.
SUFFIXES = frozenset({".gguf", ".safetensors", ".json", ".model", ".jinja", ".txt", ".tiktoken"})


def model_digest(model: Path) -> str:
    """A digest of a model's files. It does not depend on where they are."""
    digest = hashlib.sha256()
    if model.is_file():
        _add(digest, model)
        return digest.hexdigest()[:32]
    for file in sorted(each for each in model.rglob("*") if each.suffix in SUFFIXES):
        if file.is_file():
            digest.update(f"\n{file.relative_to(model)}\n".encode())
            _add(digest, file)
    return digest.hexdigest()[:32]


def _add(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{size}\n".encode())
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            digest.update(file.read())
            return
        for number in range(NUM_WINDOWS):
            file.seek(number * (size - WINDOW_BYTES) // (NUM_WINDOWS - 1))
            digest.update(file.read(WINDOW_BYTES))
