"""Lists, copies and checks what a tier has, for `engine cache`. No engine needs to run."""

import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.core.sandbox.private_files import new_version
from engine.runtime.tiers.base import Record
from engine.runtime.tiers.record import (
    BadRecordError,
    Header,
    check_payload,
    decode_header,
)

HEAD_BYTES = 32 * 1024  # more than any header has
MAX_RECORD_BYTES = 2**30


class ListedTier(Protocol):
    """A tier that can be listed."""

    name: str

    def names(self) -> list[str]: ...

    def uses(self) -> dict[str, int]: ...

    def read(self, name: str, max_bytes: int = -1) -> bytes | None: ...

    def store(self, records: Sequence[Record]) -> int: ...

    def clear(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens whose blocks are all in a tier. No other block continues them."""

    key: bytes
    identity: bytes
    parent: bytes  # the key before the first block
    token_ids: tuple[int, ...]
    num_bytes: int
    num_uses: int  # of its last block


def headers(tier: ListedTier) -> Iterator[tuple[str, Header]]:
    """Yields the name and header of every record whose header is valid, last used first."""
    for name in tier.names():
        content = tier.read(name, HEAD_BYTES)
        if content is None:
            continue
        try:
            yield name, decode_header(content)
        except BadRecordError:
            continue


def prefixes(tier: ListedTier) -> list[Prefix]:
    """The longest prefixes in a tier, most used first."""
    uses = tier.uses()
    found = {each.place.key: each for _, each in headers(tier) if each.shape.group == "full"}
    inner = {each.place.parent for each in found.values()}
    listed = []
    for key in found:
        if key in inner:
            continue
        path, at = list[Header](), found.get(key)
        while at is not None:
            path.append(at)
            at = found.get(at.place.parent)
        tokens = tuple(token for each in reversed(path) for token in each.token_ids)
        # The last block of a prompt is used less often than those before it.
        most = max(uses.get(f"{each.place.key.hex()}.full", 0) for each in path)
        size = sum(each.header_bytes + each.num_bytes for each in path)
        last = path[-1]
        listed.append(Prefix(key, last.identity, last.place.parent, tokens, size, most))
    return sorted(listed, key=lambda each: -each.num_uses)


def export(tier: ListedTier, path: Path) -> int:
    """Write all records of a tier to a tar file, which only its owner can read, because records
    have the tokens of prompts. Returns how many there were.
    """
    count = 0
    with (
        new_version(path) as file,
        io.BufferedWriter(file) as buffered,
        tarfile.open(fileobj=buffered, mode="w") as archive,
    ):
        for name in tier.names():
            content = tier.read(name)
            if content is not None:
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), 0o600
                archive.addfile(member, io.BytesIO(content))
                count += 1
    return count


def import_records(tier: ListedTier, path: Path) -> tuple[int, int]:
    """Store the records of a tar file. Returns how many were stored, and how many were refused
    because they are damaged. Nothing is unpacked: names in the file are ignored.
    """
    num_stored = num_bad = 0
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is None or member.size > MAX_RECORD_BYTES:
                num_bad += 1
                continue
            try:
                num_stored += tier.store([parse(file.read())])
            except BadRecordError:
                num_bad += 1
    return num_stored, num_bad


def parse(content: bytes) -> Record:
    """A whole record. Raises `BadRecordError` if it is damaged."""
    header = decode_header(content)
    payload = memoryview(content)[header.header_bytes :]
    check_payload(header, payload)
    return Record(header.shape, header.identity, header.place, np.frombuffer(payload, np.uint8))
