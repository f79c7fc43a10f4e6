"""Processes of a crashed owner are ended; nobody else's ever are."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.backends.external import launcher
from engine.backends.external.reaping import (
    ChildRecord,
    ProcessMark,
    RecordFile,
    family_of,
    kill_marked,
    mark_of,
    reap_stale,
    run_directory,
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def mark(process: subprocess.Popen[bytes]) -> ProcessMark:
    found = mark_of(process.pid)
    assert found is not None
    return found


def write_record(directory: Path, record: ChildRecord) -> Path:
    """As an owner leaves it that was killed."""
    path = directory / "left.json"
    path.write_bytes(msgspec.json.encode(record))
    path.chmod(0o600)
    return path


def test_processes_and_sockets_of_a_crashed_owner_are_removed(tmp_path: Path, sleeper) -> None:
    folder = tmp_path / "socket"
    folder.mkdir()
    path = write_record(tmp_path, ChildRecord("vLLM", (mark(sleeper),), str(folder)))
    assert reap_stale(tmp_path) == 1
    assert sleeper.wait(30) != 0
    assert not path.exists() and not folder.exists()


def test_a_process_with_a_recycled_pid_is_not_killed(tmp_path: Path, sleeper) -> None:
    path = write_record(tmp_path, ChildRecord("vLLM", (ProcessMark(sleeper.pid, "earlier"),)))
    assert reap_stale(tmp_path) == 0
    assert sleeper.poll() is None
    assert not path.exists()


def test_children_of_a_living_owner_are_not_killed(tmp_path: Path, sleeper) -> None:
    record = RecordFile(ChildRecord("vLLM", (mark(sleeper),)), tmp_path)
    assert reap_stale(tmp_path) == 0
    assert sleeper.poll() is None
    record.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owner_releases_its_record_lock(tmp_path: Path, sleeper) -> None:
    code = f"""
import os, pathlib
from engine.backends.external.reaping import *
RecordFile(ChildRecord("vLLM", (mark_of({sleeper.pid}),)), pathlib.Path({str(tmp_path)!r}))
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert reap_stale(tmp_path) == 1
    assert sleeper.wait(30) != 0


def test_records_writable_by_others_are_not_trusted(tmp_path: Path, sleeper) -> None:
    path = write_record(tmp_path, ChildRecord("vLLM", (mark(sleeper),)))
    path.chmod(0o622)
    assert reap_stale(tmp_path) == 0
    assert sleeper.poll() is None


def test_a_truncated_record_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "left.json"
    path.write_bytes(b'{"name": "vLL')
    path.chmod(0o600)
    assert reap_stale(tmp_path) == 0
    assert not path.exists()


def test_descendants_are_killed_with_their_ancestor() -> None:
    code = "import subprocess; subprocess.run(['sleep', '1000'], start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        own = mark(process)
        while len(family_of(own)) < 2:
            assert process.poll() is None
        grandchild = family_of(own)[1]
        assert kill_marked([own]) == 2
        assert mark_of(grandchild.pid) != grandchild or not family_of(grandchild)[1:]
    finally:
        process.kill()
        process.wait()


def test_the_record_folder_is_private(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_directory() == tmp_path / "engine"
    assert os.stat(run_directory()).st_mode & 0o777 == 0o700


class Descendant:
    """A process as psutil shows it: it lives until it is killed."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self.num_looks_until_killed = 0
        self.is_killed = False

    def cmdline(self) -> list[str]:
        self.num_looks_until_killed += 1
        assert self.num_looks_until_killed < 1000, "it is never killed"
        return list(self._command)

    def kill(self) -> None:
        self.is_killed = True


def test_a_resource_tracker_gets_time_to_clean_up_and_is_then_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = [Descendant("vllm", "serve"), Descendant("python", "-c", f"import {launcher.TRACKER}")]

    class Tree:
        def children(self, recursive: bool) -> list[Descendant]:
            assert recursive
            return [each for each in family if not each.is_killed]

    monkeypatch.setattr(launcher.psutil, "Process", Tree)
    monkeypatch.setattr(launcher, "KILL_INTERVAL_S", 0.001)
    monkeypatch.setattr(launcher, "TRACKER_GRACE_S", 0.05)
    launcher.kill_all(lambda: None)
    program, tracker = family
    assert program.num_looks_until_killed == 1 and program.is_killed
    assert tracker.num_looks_until_killed > 1 and tracker.is_killed


def test_asking_a_child_twice_to_stop_does_not_extend_its_deadline() -> None:
    parent, theirs = socket.socketpair()
    with parent, theirs:
        asked = launcher.Launcher(parent, grace_s=60.0)
        asked._ask_to_end(1.0)
        deadline = asked._deadline
        asked._ask_to_end(60.0)
        assert asked._deadline == deadline
        asked._ask_to_end(0.0)
        assert asked._deadline is not None and asked._deadline < deadline
