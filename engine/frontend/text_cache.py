"""An on-disk cache of what the frontend needs from a GGUF file.

With a cached entry, the frontend starts without parsing the file's vocabulary and tensor table, and
without importing the modules that parse them. The engine process still reads and checks the file at
every start. If the disk is full or read-only, nothing is cached, and the log says so.
"""

import hashlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine import __version__
from engine.architectures.base import ModelConfig
from engine.core.folders import store_directory
from engine.core.sandbox.private_files import open_private, write_private
from engine.core.store.checkpoint_files import mmproj_beside
from engine.core.text.tokenizer_tables import TokenizerTables

log = logging.getLogger(__name__)

SUFFIX = ".text"
FORMAT_VERSION = 4  # version of `TextFacts` and of the code that derives them from a file
_DIGEST_BYTES = 32
# Nothing is cached for a model file that changed less than this long ago. The file may change again
# without a new timestamp, because timestamps have a limited resolution.
_SETTLED_SECONDS = 2.0


class TextFacts(msgspec.Struct, frozen=True):
    config: ModelConfig
    tables: TokenizerTables
    quantization: str | None
    size_bytes: int
    recommended: dict[str, float]  # sampling parameters


def cache_directory() -> Path:
    """The cache folder `text`, beside the folder of the model store."""
    return store_directory().parent / "text"


@dataclass(frozen=True, slots=True)
class TextCache:
    """A folder with a cache file for each model. A cache file has three parts: the key of the model
    file (`key_of`), the SHA-256 of the content, and the content, which is an encoded `TextFacts`.
    """

    directory: Path = field(default_factory=cache_directory)
    max_files: int = 32

    def read(self, model: Path, key: bytes) -> TextFacts | None:
        """The cached facts of a model. None if nothing is cached, if the cache file is damaged, or
        if the model file has changed.
        """
        path = self._path_for(model)
        try:
            with open_private(path) as file:
                if file.read(_DIGEST_BYTES) != key:
                    return None
                digest, content = file.read(_DIGEST_BYTES), file.read()
            if hashlib.sha256(content).digest() != digest:
                return None
            return msgspec.msgpack.decode(content, type=TextFacts)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.info("%s is not used and will be made again: %s", path, error)
            return None

    def write(self, model: Path, key: bytes, content: bytes) -> None:
        """Store the encoded facts of a model. They are not checked until `read` decodes them."""
        path = self._path_for(model)
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.utime(self.directory)
            now = self.directory.stat().st_mtime
            if now - model.stat().st_mtime < _SETTLED_SECONDS:
                return
            self._make_room(path)
            write_private(path, key + hashlib.sha256(content).digest() + content)
        except OSError as error:
            log.warning("the tokenizer is not kept in %s: %s", path.parent, error)

    def _path_for(self, model: Path) -> Path:
        digest = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:16]
        return self.directory / f"{model.stem[:64]}-{digest}{SUFFIX}"

    def _make_room(self, path: Path) -> None:
        """Delete the oldest files, so that there is room for `path`. This also deletes temporary
        files that killed processes left behind.
        """
        others = [file for file in self.directory.iterdir() if file != path]
        others.sort(key=lambda file: file.stat().st_mtime_ns, reverse=True)
        for file in others[self.max_files - 1 :]:
            file.unlink(missing_ok=True)


def key_of(model: Path) -> bytes | None:
    """A digest of a model file's path, inode, size and timestamps, and those of its image encoder's
    file. It changes if a file changes. None if the model is not a single file.
    """
    if not model.is_file():
        return None
    facts: list[object] = [__version__, FORMAT_VERSION]
    for file in (model, mmproj_beside(model)):
        if file is not None:
            status = file.stat()
            facts += [str(file.resolve()), status.st_ino, status.st_size]
            facts += [status.st_mtime_ns, status.st_ctime_ns]
    return hashlib.sha256(repr(facts).encode()).digest()


def files_key(model: Path) -> str:
    """Identifies the files that a model is read from: their paths, sizes and timestamps."""
    key = key_of(model)
    if key is not None:
        return key.hex()
    files = sorted(each for each in model.rglob("*") if each.is_file())
    facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def keep_text(model: Path, content: bytes) -> None:
    """Store the facts that `validate_model` returned for a model, if there are any."""
    key = key_of(model)
    if content and key is not None:
        TextCache().write(model, key, content)
