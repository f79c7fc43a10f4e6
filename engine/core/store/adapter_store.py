"""The LoRA adapters that servers on this machine offer at every start, beside their base model.

The store is a private directory with a folder per adapter. The folder has a copy of the adapter's
files and a record, `adapter.json`, which is written last. So an adapter with a record is complete.
"""

import hashlib
import os
import re
import shutil
from pathlib import Path

import msgspec

from engine.core.errors import (
    ConfigError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    disk_full_error,
    is_disk_full,
)
from engine.core.folders import data_directory
from engine.core.sandbox.private_files import open_private, write_private
from engine.core.store.checkpoint_files import PEFT_FILES

_RECORD = "adapter.json"
_MAX_RECORD_BYTES = 1 << 16
NAME = re.compile(r"[!-~]{1,256}")


class KeptAdapter(msgspec.Struct, frozen=True):
    """The record of an adapter. `base` is the id under which its base model is served. `entry` is
    the name of a GGUF file in the folder; None: the folder is a PEFT folder. `tenant` is who
    trained the adapter on a server; None: every client of a server may use it.
    """

    name: str
    base: str
    entry: str | None = None
    tenant: str | None = None


def adapters_directory() -> Path:
    return data_directory() / "adapters"


def kept_adapters(base: str | None = None) -> dict[str, Path]:
    """The path of each adapter in the store, by name. With `base`, only those of this model."""
    found = {}
    for record in sorted(adapters_directory().glob(f"*/{_RECORD}")):
        kept = _read(record)
        if kept is not None and base in (None, kept.base):
            found[kept.name] = _path(record.parent, kept)
    return found


def records() -> list[KeptAdapter]:
    found = (_read(each) for each in sorted(adapters_directory().glob(f"*/{_RECORD}")))
    return [kept for kept in found if kept is not None]


def is_address(path: str) -> bool:
    """Whether an adapter has to be downloaded from there."""
    is_remote = path.startswith(("hf:", "http://", "https://"))
    return is_remote and not Path(path).expanduser().exists()


def real_path(path: str) -> Path:
    """The path without `~` and symbolic links. Raises `InvalidRequestError` if it is no path."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequestError(f"lora_path is no path: {error}", param="lora_path") from None


def check_is_adapter(path: Path) -> None:
    """Raise `InvalidRequestError` unless a file or a PEFT folder is there. So no other folder is
    walked.
    """
    if not os.path.isfile(path) and not os.path.isfile(path / PEFT_FILES[0]):
        raise InvalidRequestError(
            f"there is no adapter at {path}: it is a .gguf file, or a folder with {PEFT_FILES[0]}",
            param="lora_path",
        )


def tenant_of(path: Path) -> str | None:
    """The tenant to whom the adapter at this path belongs. None if it belongs to nobody, or is not
    in the store.
    """
    folder = path if path.is_dir() else path.parent
    if folder.parent != adapters_directory().resolve():
        return None
    kept = _read(adapters_directory() / folder.name / _RECORD)
    return None if kept is None else kept.tenant


def keep_adapter(
    name: str, source: Path, base: str, *, replaces: bool = False, tenant: str | None = None
) -> Path:
    """Copy an adapter into the store, so that servers of the model `base` serve it as `name`.
    Returns the path of the copy. With `replaces`, an adapter of this name is replaced. With
    `tenant`, only this tenant may use it.
    """
    if not NAME.fullmatch(name):
        raise ConfigError("an adapter's name is 1 to 256 visible ASCII characters")
    folder = _folder(name)
    if (folder / _RECORD).exists() and not replaces:
        raise ConflictError(f"there is an adapter '{name}' already; remove it first")
    names = [source.name] if source.is_file() else [*PEFT_FILES]
    origin = source.parent if source.is_file() else source
    for each in names:
        if not (origin / each).is_file():
            raise NotFoundError(f"{source} is no adapter: it holds no {each}")
    kept = KeptAdapter(name, base, source.name if source.is_file() else None, tenant)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in names:
            shutil.copyfile(origin / each, folder / each)
        write_private(folder / _RECORD, msgspec.json.encode(kept))
    except OSError as error:
        if is_disk_full(error):
            raise disk_full_error() from None
        raise
    return _path(folder, kept)


def remove_adapter(name: str) -> None:
    folder = _folder(name)
    if not (folder / _RECORD).exists():
        raise NotFoundError(f"there is no adapter '{name}'")
    (folder / _RECORD).unlink()
    shutil.rmtree(folder)


def _folder(name: str) -> Path:
    """A given name is not used as part of a path."""
    return adapters_directory() / hashlib.sha256(name.encode()).hexdigest()[:16]


def _path(folder: Path, kept: KeptAdapter) -> Path:
    return folder if kept.entry is None else folder / kept.entry


def _read(record: Path) -> KeptAdapter | None:
    try:
        with open_private(record) as file:
            kept = msgspec.json.decode(file.read(_MAX_RECORD_BYTES), type=KeptAdapter)
    except (OSError, msgspec.MsgspecError):
        return None
    is_plain = kept.entry is None or Path(kept.entry).name == kept.entry
    return kept if is_plain and record.parent == _folder(kept.name) else None
