"""The tier on disk: a folder with one file per block, which survives the process.

A file is written under a temporary name and renamed, so that no reader sees a part of it. Files are
not flushed to the disk: if the machine loses power, a checksum reveals a file that lacks data.
Several engines may use the folder at once. Each of them limits only the files that it knows of.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.core.sandbox.private_files import PART_SUFFIX, write_private
from engine.runtime.model_runner import GROUPS, Bytes
from engine.runtime.radix_cache import EvictionPolicy
from engine.runtime.tiers.base import BoundedIndex, Loaded, Record, Wanted
from engine.runtime.tiers.record import PIECE_BYTES

log = logging.getLogger(__name__)

USES_FILE = "uses.json"  # how often each block was read, for LFU and for warm-up
SCAN_INTERVAL_S = 60.0
ABANDONED_S = 600.0  # a temporary file of this age belongs to a process that was killed
_SUFFIXES = tuple(f".{group}" for group in GROUPS)
_OWN_NAME = re.compile(rf"[0-9a-f]{{64}}\.({'|'.join(GROUPS)})(\.\d+{re.escape(PART_SUFFIX)})?")


class DiskTier:
    name = "disk"
    takes_blocks = True

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        policy: EvictionPolicy,
        ttl_s: float | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory
        self._index = BoundedIndex(max_bytes, policy, ttl_s, clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._used: list[str] = []  # names that were read since the last `tidy_up`
        self._scanned_at: float | None = None
        self._has_news = False

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    @property
    def num_records(self) -> int:
        return len(self._index)

    def path_of(self, name: str) -> Path:
        return self.directory / name[:2] / name

    def find(self, names: Sequence[str]) -> list[bool]:
        # The file system is asked, and not the index, because another engine may have written.
        return [os.path.exists(self.path_of(name)) for name in names]

    def load(self, wanted: Wanted, rows: Bytes) -> list[Loaded]:
        found = [self._load(wanted, index, row.data) for index, row in enumerate(rows)]
        self.use([wanted.name(index) for index, each in enumerate(found) if each is Loaded.OK])
        return found

    def store(self, records: Sequence[Record]) -> int:
        if self._scanned_at is None:
            self._scan()
        num_stored = 0
        for record in records:
            path = self.path_of(record.name)
            if record.name in self._index and path.exists():
                continue
            self._write(path, record)
            self._has_news = True
            num_stored += 1
            with self._lock:
                surplus = self._index.add(record.name, record.num_bytes)
            self._unlink(surplus)
        return num_stored

    def use(self, names: Sequence[str]) -> None:
        with self._lock:
            self._used += names

    def tidy_up(self) -> None:
        with self._lock:
            used, self._used = self._used, []
            self._index.use(used)
        now = self._clock()
        for name in used:
            # The time of last use has to survive this process.
            with suppress(OSError):
                os.utime(self.path_of(name), (now, now))
        self._has_news |= bool(used)
        if self._scanned_at is None or (
            self._has_news and abs(now - self._scanned_at) >= SCAN_INTERVAL_S
        ):
            with suppress(OSError):  # a full or read-only disk can still be read
                self._save_uses()
            self._scan()
        with self._lock:
            late = self._index.expired()
        self._unlink(late)

    def close(self) -> None:
        self.tidy_up()
        with suppress(OSError):
            self._save_uses()

    def clear(self) -> int:
        """Remove every block. Returns how many there were."""
        names = [name for name, _, _ in self._files()]
        self._unlink(names)
        with self._lock:
            self._index.clear()
        return len(names)

    def uses(self) -> dict[str, int]:
        """How often each block was read, by name, as far as earlier processes have noted it."""
        try:
            return msgspec.json.decode(
                (self.directory / USES_FILE).read_bytes(), type=dict[str, int]
            )
        except (OSError, msgspec.DecodeError):
            return {}

    def names(self) -> list[str]:
        """The names of all blocks, last used first."""
        files = sorted(self._files(), key=lambda each: -each[2])
        return [name for name, _, _ in files]

    def read(self, name: str, max_bytes: int = -1) -> bytes | None:
        """The first bytes of a record, or all of them, unchecked."""
        try:
            with self.path_of(name).open("rb") as file:
                return file.read(max_bytes)
        except FileNotFoundError:
            return None

    def _load(self, wanted: Wanted, index: int, payload: memoryview) -> Loaded:
        name, header = wanted.name(index), bytearray(wanted.shape.header_bytes)
        try:
            handle = os.open(self.path_of(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Loaded.MISSING
        try:
            is_whole = _read(handle, header, payload)
        finally:
            os.close(handle)
        if is_whole and wanted.is_valid(index, header, payload):
            return Loaded.OK
        self._unlink([name])
        return Loaded.BAD

    def _write(self, path: Path, record: Record) -> None:
        part = path.with_name(f"{path.name}.{os.getpid()}{PART_SUFFIX}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            handle = os.open(part, flags, 0o600)
        except FileNotFoundError:
            # No block with these first two digits was stored yet, or somebody removed the folder.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(part, flags, 0o600)
        try:
            _write_all(handle, record.header(), record.payload.data)
        except OSError:
            with suppress(OSError):
                os.unlink(part)
            raise
        finally:
            os.close(handle)
        os.replace(part, path)

    def _files(self) -> Iterator[tuple[str, int, float]]:
        """Yields the name, size and time of last use of each file. Removes abandoned files."""
        for folder in _entries(self.directory):
            if not folder.is_dir(follow_symlinks=False) or len(folder.name) != 2:
                continue
            for file in _entries(Path(folder.path)):
                if not _OWN_NAME.fullmatch(file.name):
                    continue  # the folder had files before it became a tier
                with suppress(OSError):
                    status = file.stat(follow_symlinks=False)
                    if file.name.endswith(_SUFFIXES):
                        yield file.name, status.st_size, status.st_mtime
                    elif self._clock() - status.st_mtime > ABANDONED_S:
                        os.unlink(file.path)

    def _scan(self) -> None:
        """Build the index from the files, oldest first."""
        uses = self.uses()
        with self._lock:
            uses |= {name: self._index.num_uses(name) for name in self._index}
            self._index.clear()
            surplus: list[str] = []
            for name, size, used_at in sorted(self._files(), key=lambda each: each[2]):
                surplus += self._index.add(name, size, used_at, uses.get(name, 0))
        self._unlink(surplus)
        self._scanned_at = self._clock()

    def _save_uses(self) -> None:
        if not self._has_news or not self.directory.exists():
            return
        with self._lock:
            counts = {name: self._index.num_uses(name) for name in self._index}
        used = {name: count for name, count in counts.items() if count}
        write_private(self.directory / USES_FILE, msgspec.json.encode(used))
        self._has_news = False

    def _unlink(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(OSError):
                os.unlink(self.path_of(name))


def _entries(directory: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except OSError:
        return []


def _read(handle: int, header: bytearray, payload: memoryview) -> bool:
    """Read a record in pieces. Returns False if the file is shorter or longer than it must be."""
    if os.fstat(handle).st_size != len(header) + len(payload):
        return False
    done = os.preadv(handle, [header, payload[:PIECE_BYTES]], 0) - len(header)
    while 0 < done < len(payload):
        count = os.preadv(handle, [payload[done : done + PIECE_BYTES]], len(header) + done)
        if not count:
            return False
        done += count
    return done == len(payload)


def _write_all(handle: int, header: bytes, payload: memoryview) -> None:
    whole = len(header) + len(payload)
    done = os.writev(handle, [header, payload[:PIECE_BYTES]])
    while done < whole:
        if done < len(header):
            done += os.write(handle, header[done:])
            continue
        start = done - len(header)
        done += os.write(handle, payload[start : start + PIECE_BYTES])
