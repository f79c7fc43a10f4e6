"""A full disk under either audit log costs lines of it, never a request, a change or a whole line
that is there already (FLT-23; T1).
"""

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.plugins.audit_log import RequestAudit
from engine.servers.ops.audit import AuditLog
from tests.support.fakes.plugin_hosts import a_chat, fed, running


class Disk:
    """One that takes some bytes of a file named audit.jsonl and no more, when it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, handle: int, data: bytes) -> int:
        name = os.readlink(f"/proc/self/fd/{handle}")
        if self.is_full and name.endswith("audit.jsonl"):
            return self._write(handle, data[: len(data) // 2])
        return self._write(handle, data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    yield Disk(monkeypatch)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_admin_changes_succeed_on_a_full_disk_and_the_audit_log_notes_the_gap(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    audit = AuditLog(tmp_path)
    async with audit.change("root", "drain"):
        pass
    disk.is_full = True
    async with audit.change("root", "undrain"):
        pass
    assert "can't be written" in caplog.text
    disk.is_full = False
    async with audit.change("root", "reload"):
        pass
    assert [each["action"] for each in lines(audit.path)] == ["drain", "reload"]
    with audit.path.open("ab") as file:
        file.write(b'{"torn by a power cut')
    assert [each["action"] for each in await audit.newest(10)] == ["reload", "drain"]


async def test_requests_pass_on_a_full_disk_and_the_audit_plugin_is_disabled_after_three_failures(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.jsonl"
    caplog.set_level(logging.WARNING)
    async with running([RequestAudit()], options={"path": str(path)}) as made:
        (host,) = made.hosts
        for number in range(8):
            disk.is_full = number >= 2
            assert await fed(made, a_chat(f"question {number}"))
            await asyncio.gather(*host._observing)
    assert not host.is_active and host.num_failures == 3
    assert len(lines(path)) == 2
