"""Decides which files may enter the model store, by their names and their first bytes.

Pickle checkpoints run code when opened, so they are refused before download. A pickle or an archive
under another name is refused by its first bytes.
"""

from engine.core.errors import ModelFormatError

HEAD_BYTES = 16  # number of bytes at a file's start that `check_head` needs

_WEIGHTS = (".gguf", ".safetensors")
_TEXT = (".json", ".jinja", ".txt", ".model")  # configuration and tokenizer files
_PICKLE_NAMES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".joblib")
_MAX_SAFETENSORS_HEADER = 16 * 2**20
_PICKLE_PROTOCOLS = range(2, 6)


def check_name(name: str) -> None:
    """Raise `ModelFormatError` unless the name is that of a GGUF file, a safetensors file or a
    configuration or tokenizer file.
    """
    lowered = name.lower()
    if lowered.endswith(_PICKLE_NAMES):
        raise ModelFormatError(
            f"'{name}' is a pickle-based or array format, which may run code when it is opened; "
            "choose a .gguf or .safetensors file"
        )
    if not lowered.endswith(_WEIGHTS + _TEXT):
        raise ModelFormatError(f"'{name}' is not a model file; choose a .gguf or .safetensors file")


def check_head(name: str, head: bytes) -> None:
    """Raise `ModelFormatError` if the start of a file contradicts the file's name. `head` has the
    first `HEAD_BYTES` bytes, or all bytes of a shorter file.
    """
    if _is_archive(head) and not _is_safetensors(head):
        raise ModelFormatError(
            f"'{name}' holds a pickle or an archive, whatever its name says; it was not kept"
        )
    lowered = name.lower()
    if lowered.endswith(".gguf") and not head.startswith(b"GGUF"):
        raise ModelFormatError(f"'{name}' does not start with the GGUF magic; it was not kept")
    if lowered.endswith(".safetensors") and not _is_safetensors(head):
        raise ModelFormatError(
            f"'{name}' does not start with a safetensors header; it was not kept"
        )
    if lowered.endswith(".json") and not head.lstrip().startswith((b"{", b"[")):
        raise ModelFormatError(f"'{name}' is not JSON; it was not kept")


def _is_archive(head: bytes) -> bool:
    pickled = len(head) >= 2 and head[0] == 0x80 and head[1] in _PICKLE_PROTOCOLS
    return pickled or head.startswith(b"PK\x03\x04")


def _is_safetensors(head: bytes) -> bool:
    """Whether the file starts with a plausible header length and a JSON object. This check is
    needed because the bytes of the length may look like a pickle.
    """
    return (
        len(head) > 8
        and 2 <= int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER
        and head[8:9] == b"{"
    )
