"""The model store: the pulled models on disk. It also finds the path of a model by its name.

The store is one private directory with a folder per model. The folder has the model's files and a
record, `model.json`. Downloads in progress are in `.partial/NAME`. Their folder is renamed to its
place when everything in it is verified, so a model with a record is complete. `.locks` has one lock
file per name. A given name is compared with the names in the records. It is not used as part of a
path.
"""

import difflib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from engine.core.errors import ConfigError, NotFoundError
from engine.core.folders import store_directory
from engine.core.store.catalogue import CATALOGUE

_RECORD = "model.json"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
_WEIGHTS = (".gguf", ".safetensors")
_ADDRESS = re.compile(r"(hf|pypi|https?):.+")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?(:\w+)?", re.ASCII)


class StoredModelFile(msgspec.Struct, frozen=True):
    name: str  # relative to the model's folder, at most one subfolder deep
    size: int
    sha256: str


class StoredModel(msgspec.Struct, frozen=True):
    """The record of a model, in `model.json`. `entry` is the name of the file to open; None means
    that the folder itself is opened.
    """

    name: str
    source: str
    date: str  # ISO 8601, UTC
    files: tuple[StoredModelFile, ...]
    entry: str | None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def sha256(self) -> str | None:
        """The SHA-256 of the weight file; None if there are several."""
        weights = [file for file in self.files if file.name.lower().endswith(_WEIGHTS)]
        return weights[0].sha256 if len(weights) == 1 else None


def check_model_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be a model name: use up to 100 lower-case letters, digits, '.', '_' "
            "and '-', starting with a letter or digit",
            param="name",
        )
    return name


def check_file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be a file name in the model store")
    return name


class ModelStore:
    """The models in one directory. The directory need not exist. The first pull creates it with
    mode 0700.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or store_directory()

    def models(self) -> dict[str, StoredModel]:
        """All complete models by name. Folders are left out if their record is damaged, or if a
        file is missing or has the wrong size.
        """
        found = {}
        for folder in sorted(self.root.glob("[!.]*")):
            model = None if folder.is_symlink() else self._read(folder)
            if model is not None:
                found[model.name] = model
        return found

    def path(self, model: StoredModel) -> Path:
        """The path to open: the weight file, or the folder of a multi-file checkpoint."""
        folder = self.root / model.name
        return folder if model.entry is None else folder / model.entry

    def _read(self, folder: Path) -> StoredModel | None:
        try:
            model = msgspec.json.decode((folder / _RECORD).read_bytes(), type=StoredModel)
        except (OSError, msgspec.DecodeError):
            return None
        names = {file.name for file in model.files}
        if (
            model.name != folder.name
            or not _NAME.fullmatch(model.name)
            or not all(_is_whole(folder, file) for file in model.files)
            or (model.entry is not None and model.entry not in names)
        ):
            return None
        return model

    @contextmanager
    def lock(self, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Lock a model name, so that only one process pulls it at a time. If another process has
        the lock, `on_wait` is called before waiting. A crash releases the lock.
        """
        locks = self._private_folder(".locks")
        with open(locks / f"{check_model_name(name)}.lock", "w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def staging(self, name: str) -> Path:
        """The folder for a download in progress. The caller must hold the lock of the name."""
        return self._private_folder(f".partial/{check_model_name(name)}")

    def publish(self, staging: Path, model: StoredModel) -> Path:
        """Rename a verified staging folder to the model's folder. The caller must hold the lock of
        the name.

        Replaces the folder of a damaged model with the same name.
        """
        _keep_only(staging, {file.name for file in model.files})
        record = staging / _RECORD
        record.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=2))
        sync(record)
        sync(staging)
        final = self.root / model.name
        _remove(final)
        staging.rename(final)
        sync(self.root)
        return self.path(model)

    def remove(self, name: str) -> None:
        """Delete a model. If this is interrupted, the model does not count as complete."""
        with self.lock(name, lambda: None):
            folder = self.root / check_model_name(name)
            (folder / _RECORD).unlink(missing_ok=True)
            _remove(folder)
            sync(self.root)

    def _private_folder(self, relative: str) -> Path:
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root.chmod(0o700)
        folder = self.root / relative
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder


def resolve_model(name_or_path: str, store: ModelStore | None = None) -> Path:
    """The path of a model that the operator named: an existing path, or else the name of a pulled
    model.

    This is only for the command line and settings. A model name from a client is never resolved
    here: it must be the name of a served model.
    """
    store = store or ModelStore()
    if "\0" in name_or_path or not name_or_path:
        raise NotFoundError("a model is a path or a name, and not empty; `engine list` shows names")
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    pulled = store.models()
    if name_or_path in pulled:
        return store.path(pulled[name_or_path])
    if is_spec(name_or_path) and (found := _find_spec(full_spec(name_or_path), store)):
        return found
    near = _paths_beside(path) if "/" in name_or_path or path.suffix else []
    is_near = bool(difflib.get_close_matches(name_or_path, near, n=1))
    if name_or_path in CATALOGUE or (is_spec(name_or_path) and not is_near):
        raise NotFoundError(
            f"model '{name_or_path}' is not on this machine yet: run `engine pull {name_or_path}`"
        )
    close = difflib.get_close_matches(name_or_path, [*near, *pulled, *CATALOGUE], n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise NotFoundError(
        f"no file and no pulled model is called {name_or_path!r}: {hint}`engine list` shows the "
        "names, `engine pull NAME` fetches one"
    )


def _paths_beside(path: Path) -> list[str]:
    """What could be models in the folder of a path that does not exist, as the user would write
    them.
    """
    try:
        beside = sorted(path.parent.iterdir())
    except OSError:
        return []
    known = [each for each in beside if each.is_dir() or each.suffix in _WEIGHTS]
    return [str(path.with_name(each.name)) for each in known]


def is_spec(text: str) -> bool:
    """Whether a text is the address of a model: a URL, `hf:...`, `pypi:...` or `ORG/REPO[:QUANT]`.
    The name of a weight file is a path, and not an address.
    """
    if _ADDRESS.fullmatch(text):
        return True
    return _REPOSITORY.fullmatch(text) is not None and not text.lower().endswith(_WEIGHTS)


def is_offline() -> bool:
    """Whether the user forbids downloads from the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def needs_pull(model: str) -> bool:
    """Whether a model is not on this machine, but `pull` could download it. Always false if
    $HF_HUB_OFFLINE is set.
    """
    if is_offline():
        return False
    if model not in CATALOGUE and not is_spec(model):
        return False
    try:
        resolve_model(model)
    except NotFoundError:
        return True
    return False


def full_spec(spec: str) -> str:
    """The address with its kind: `ORG/REPO` is `hf:ORG/REPO`."""
    return f"hf:{spec}" if _REPOSITORY.fullmatch(spec) and is_spec(spec) else spec


def default_name(model: str) -> str:
    """The id of a model for clients, if no other is set: the name without the folder and the ending
    of a weight file. An address of the hub is kept, without `hf:`.
    """
    if is_spec(model) and not Path(model).exists():
        return model.removeprefix("hf:")
    name = Path(model).name
    return name.removesuffix(Path(model).suffix) if name.lower().endswith(_WEIGHTS) else name


def _find_spec(spec: str, store: ModelStore) -> Path | None:
    """The path of a model by its address: a model that was pulled from there, or one in the hub's
    own cache.
    """
    for model in store.models().values():
        if model.source == spec:
            return store.path(model)
    if not spec.startswith("hf:"):
        return None
    from engine.core.store.hub import HubSpec, cached_snapshot  # imports the HTTP client

    return cached_snapshot(HubSpec.parse(spec.removeprefix("hf:")))


def sync(path: Path) -> None:
    """Flush a file's content, or the list of a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_whole(folder: Path, file: StoredModelFile) -> bool:
    """Whether the file is in the folder with the recorded size. Links don't count."""
    parts = file.name.split("/")
    if len(parts) > 2 or not all(map(_FILE_NAME.fullmatch, parts)):
        return False
    path = folder / file.name
    is_linked = path.is_symlink() or path.parent.is_symlink()
    return path.is_file() and not is_linked and path.stat().st_size == file.size


def _keep_only(folder: Path, wanted: set[str]) -> None:
    """Delete everything in a folder except the files in `wanted` (names relative to `folder`), and
    flush the folder's entries to disk.
    """
    for entry in folder.iterdir():
        inner = {name.partition("/")[2] for name in wanted if name.startswith(f"{entry.name}/")}
        if inner and entry.is_dir() and not entry.is_symlink():
            _keep_only(entry, inner)
        elif entry.name not in wanted:
            _remove(entry)
    sync(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
