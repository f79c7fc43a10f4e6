"""A foreign program under its launcher: what it says, how it ends, and that nothing of it stays."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from engine.backends.external.child_logs import ChildLog
from engine.backends.external.external_child import ExternalChild, ending
from engine.backends.external.listening import HeldPort, PrivateSocket
from engine.backends.external.reaping import reap_stale, run_directory
from engine.core.errors import ConfigError

pytestmark = pytest.mark.seconds  # each child is a process, and its launcher another

# Writes the pids of itself and of two children, one in a session of its own, then waits.
FAMILY = textwrap.dedent("""
    import os, signal, subprocess, sys, time
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    plain = subprocess.Popen(["sleep", "1000"])
    apart = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("family", os.getpid(), plain.pid, apart.pid, flush=True)
    time.sleep(0 if "ends" in sys.argv else 1000)
""")


@pytest.fixture(autouse=True)
def _own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


async def start(log: ChildLog, *argv: str, grace_s: float = 5.0) -> ExternalChild:
    return await ExternalChild.start("toy", argv, dict(os.environ), log, grace_s=grace_s)


async def start_family(*manners: str, grace_s: float = 5.0) -> tuple[ExternalChild, list[int]]:
    log = ChildLog("toy")
    child = await start(log, sys.executable, "-c", FAMILY, *manners, grace_s=grace_s)
    await until(lambda: log.last_line.startswith("family"))
    return child, [int(word) for word in log.last_line.split()[1:]]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def test_a_childs_last_output_is_its_cause_of_exit() -> None:
    log = ChildLog("toy")
    child = await start(log, sys.executable, "-c", "import sys; sys.exit('the reason')")
    assert await child.ended == 1
    assert log.cause == "the reason"
    await child.stop()
    assert list(run_directory().iterdir()) == []


async def test_a_child_gets_only_the_given_environment() -> None:
    log = ChildLog("toy")
    code = "import os; print(os.environ.get('GIVEN'), os.environ.get('HOME'))"
    argv = [sys.executable, "-c", code]
    child = await ExternalChild.start("toy", argv, {"GIVEN": "yes"}, log, grace_s=1)
    assert await child.ended == 0
    assert log.last_line == "yes None"
    await child.stop()


async def test_a_missing_program_is_reported_with_status_127() -> None:
    log = ChildLog("toy")
    child = await start(log, "/no/such/program")
    assert await child.ended == 127
    assert "/no/such/program can't be started: No such file" in log.cause
    await child.stop()


async def test_stopping_a_child_leaves_no_descendant() -> None:
    child, pids = await start_family()
    await child.stop()
    assert child.ended.done()
    assert all(map(is_gone, pids))


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    child, pids = await start_family("deaf", grace_s=0.2)
    await child.stop()
    assert all(map(is_gone, pids))


async def test_shared_memory_of_a_killed_child_is_removed() -> None:
    log = ChildLog("toy")
    code = """
        import time
        from multiprocessing.shared_memory import SharedMemory
        print(SharedMemory(create=True, size=1).name, flush=True)
        time.sleep(1000)
    """
    child = await start(log, sys.executable, "-c", textwrap.dedent(code), grace_s=0)
    await until(lambda: log.last_line != "")
    shared = Path("/dev/shm") / log.last_line
    assert shared.exists()
    await child.stop()
    await until(lambda: not shared.exists())


async def test_a_child_that_exits_leaves_no_descendant() -> None:
    child, pids = await start_family("ends")
    assert await child.ended == 0
    assert all(map(is_gone, pids))
    await child.stop()


async def test_a_killed_child_reports_its_signal() -> None:
    child, pids = await start_family()
    os.kill(pids[0], signal.SIGKILL)
    assert ending(await child.ended) == "signal SIGKILL"
    await until(lambda: all(map(is_gone, pids)))
    await child.stop()


async def test_killing_the_launcher_kills_the_child() -> None:
    child, pids = await start_family()
    child.note_processes()
    os.kill(child.pid, signal.SIGKILL)
    assert ending(await child.ended) == "signal SIGKILL"
    await until(lambda: is_gone(pids[0]))  # by the death signal
    await child.stop()
    assert all(map(is_gone, pids))


@pytest.mark.parametrize("manner", ["polite", "deaf"])
def test_no_descendant_survives_a_killed_parent(manner: str) -> None:
    owner, pids = owner_of_a_family(manner)
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 60
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, "something was left behind"
        time.sleep(0.02)


def test_the_next_start_reaps_processes_of_a_crashed_owner_and_launcher() -> None:
    """Owner and launcher killed in the same moment: what has a session of its own lives on."""
    owner, pids = owner_of_a_family("deaf")
    launcher = psutil.Process(owner.pid).children()[0]
    launcher.suspend()
    owner.kill()
    owner.wait()
    launcher.kill()
    assert not is_gone(pids[2])
    assert reap_stale() >= 1
    assert all(map(is_gone, pids))
    assert list(run_directory().iterdir()) == []


def owner_of_a_family(manner: str) -> tuple[subprocess.Popen[str], list[int]]:
    code = textwrap.dedent(f"""
        import asyncio
        from tests.unit.backends.test_external_child import start_family
        async def main():
            child, pids = await start_family({manner!r}, grace_s=60.0)
            child.note_processes()
            print(*pids, flush=True)
            await asyncio.sleep(1000)
        asyncio.run(main())
    """)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, [int(word) for word in owner.stdout.readline().split()]


def test_a_port_in_use_is_refused_at_once() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f":{port}: another program is using it"):
            HeldPort("127.0.0.1", port)


def test_a_reserved_port_can_be_bound_repeatedly() -> None:
    import socket

    place = HeldPort("127.0.0.1", 0)
    for _ in range(2):  # a child, and the child after it
        with socket.create_server(("127.0.0.1", place.port)):
            socket.create_connection(("127.0.0.1", place.port)).close()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", place.port))
    place.release()


def test_a_child_listening_on_all_interfaces_is_reached_over_localhost() -> None:
    place = HeldPort("0.0.0.0", 0)
    assert place.url == f"http://127.0.0.1:{place.port}"
    place.release()


def test_a_private_socket_folder_has_mode_0700_and_is_removed() -> None:
    place = PrivateSocket()
    assert os.stat(place.folder).st_mode & 0o777 == 0o700
    assert place.environment["TMPDIR"] == place.folder
    assert not place.environment["TORCHINDUCTOR_CACHE_DIR"].startswith(place.folder)
    place.path.touch()
    place.prepare()
    assert not place.path.exists()
    place.release()
    assert not os.path.exists(place.folder)
