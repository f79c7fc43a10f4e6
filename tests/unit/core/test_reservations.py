"""Engines inside one memory limit plan with what the others leave. Old lacks are forgotten."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.backends.custom import base_custom
from engine.core.memory import MIB, MemoryLimit, MemoryRoom
from engine.ipc.options import EngineOptions
from engine.worker import reservations
from engine.worker.reservations import reservation
from tests.support.toy_engine.backend import ToyBackend

PLAN = """
import sys
from pathlib import Path
from engine.worker.reservations import reservation
with reservation(Path(sys.argv[1])) as reserved:
    reserved.planned = int(sys.argv[2])
print("planned", flush=True)
sys.stdin.read()
"""


def other_engine(path: Path, planned: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PLAN, str(path), str(planned)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"planned\n"
    return process


def test_memory_planned_by_other_engines_is_not_counted_as_free(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    planned = 4096 * MIB
    with other_engine(path, planned) as other:
        with reservation(path) as reserved:
            assert planned / 2 < reserved.others < planned, "what it has taken is not counted twice"
            assert "MiB more" in reserved.note
            reserved.planned = MIB
        with reservation(path) as again:
            assert again.others == pytest.approx(reserved.others, rel=0.1), "its own plan is new"
        other.kill()
        other.wait()
        with reservation(path) as reserved:
            assert not reserved.others and not reserved.note


@pytest.mark.parametrize(
    "content", [b"\xff" * 100, b"1 2", b"1 2 3 4\n", b"-1 0 5\n", b"9" * 40 + b" 1 1\n", b"1 1 1\n"]
)
def test_a_corrupt_reservation_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plans"
    path.write_bytes(content)
    with reservation(path) as reserved:
        assert not reserved.others


def test_a_symlinked_reservation_file_is_not_followed(tmp_path: Path) -> None:
    target, path = tmp_path / "precious", tmp_path / "plans"
    target.write_text("content")
    path.symlink_to(target)
    with reservation(path) as reserved:
        reserved.planned = MIB
    assert target.read_text() == "content"


@pytest.mark.parametrize("is_limited", [False, True])
def test_reservations_are_written_only_inside_a_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_limited: bool
) -> None:
    monkeypatch.setattr(reservations.tempfile, "gettempdir", lambda: str(tmp_path))
    room = MemoryRoom(MIB, MIB, is_limited=is_limited)
    monkeypatch.setattr(reservations, "memory_room", lambda: room)
    monkeypatch.setattr(reservations, "cgroup_limits", lambda: [MemoryLimit(MIB, 0, "x")])
    with reservation() as reserved:
        reserved.planned = MIB
    written = tmp_path / f"engine-memory-{os.getuid()}"
    assert written.exists() is is_limited
    assert not is_limited or written.stat().st_mode & 0o777 == 0o600


def test_the_reduced_kv_cache_after_an_oom_kill_is_restored_after_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next engine gets its whole KV cache again when no other was killed for an hour."""
    backend, counts = ToyBackend(), iter([*range(1, 4), 3, 3])
    monkeypatch.setattr(base_custom, "num_oom_kills", lambda: next(counts))
    backend._num_oom_kills = 0

    def planned() -> int:
        backend._count_oom_kills()
        options: EngineOptions = backend._options
        return options.num_oom_kills

    assert [planned() for _ in range(4)] == [1, 2, 3, 3]
    monkeypatch.setattr(base_custom, "OOM_MEMORY_S", 0.0)
    assert planned() == 0
