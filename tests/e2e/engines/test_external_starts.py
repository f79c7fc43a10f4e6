"""`engine serve` with an external engine, as a user starts it: what goes wrong is one clear line,
in the time that was stated, and nothing stays behind; nor does it when the server is killed.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.backends.sglang import SGLangBackend, SGLangConfig
from engine.backends.vllm import VLLMBackend, VLLMConfig
from engine.core.errors import ModelError
from tests.support.fakes.stand_in_engine import FaultFile
from tests.support.fakes.stand_in_engine.server import LEFT_FILES
from tests.support.servers.live_server import wait_until
from tests.support.servers.served import serve

START_TIMEOUT_S = 1
LISTENING_BY_THEN_S = 8  # on a busy machine too, so that what it answers is the reason


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where sockets are made
    yield tmp_path


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def options(faults: FaultFile, **given: str) -> list[str]:
    env = ", ".join(f'{name} = "{value}"' for name, value in faults.env.items())
    pairs = {"env": f"{{ {env} }}", "start_timeout_s": "60", "stop_grace_s": "0.2"}
    return [word for pair in (pairs | given).items() for word in ("--option", "=".join(pair))]


def left_behind(folder: Path, faults: FaultFile) -> list[str]:
    patterns = ("engine-*", "engine/*", f"{LEFT_FILES}*")
    files = [str(each) for pattern in patterns for each in folder.glob(pattern)]
    return files + [str(pid) for pid in faults.pids if not is_gone(pid)]


def refusal_of(folder: Path, faults: FaultFile, model: str, *given: str) -> str:
    """The one line that a start ends with."""
    argv = [sys.executable, "-m", "engine.cli.main", "serve", model, "--port", "0", *given]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode in (1, 2), done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "Traceback (most recent call last):\n  File" not in done.stderr
    assert left_behind(folder, faults) == []
    return errors[0]


def test_an_external_engine_that_exits_while_loading_is_reported_with_its_error(
    run_folder: Path,
) -> None:
    faults = FaultFile(run_folder, exit_at_start=3)
    line = refusal_of(run_folder, faults, "owner/name", "--backend", "vllm", *options(faults))
    assert "vLLM ended while loading, with exit status 3: ValueError: no such layer" in line


def test_an_external_engine_that_is_never_ready_times_out_with_its_last_health_status(
    run_folder: Path,
) -> None:
    faults = FaultFile(run_folder, is_never_ready=True, grandchild="session", ignores_sigterm=True)
    given = options(faults, start_timeout_s=str(LISTENING_BY_THEN_S))
    line = refusal_of(run_folder, faults, "owner/name", "--backend", "vllm", *given)
    assert "vLLM was not ready after 8 s (start_timeout_s): /health answers 503" in line


def test_a_missing_interpreter_for_an_external_engine_is_named(run_folder: Path) -> None:
    faults = FaultFile(run_folder)
    given = options(faults, python='"/no/such/python"')
    line = refusal_of(run_folder, faults, "owner/name", "--backend", "sglang", *given)
    assert "python: '/no/such/python' is not a program" in line


def test_a_port_in_use_for_an_external_engine_is_reported(run_folder: Path) -> None:
    faults = FaultFile(run_folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = options(faults, port=str(port))
        line = refusal_of(run_folder, faults, "owner/name", "--backend", "vllm", *given)
    assert f"cannot listen on 127.0.0.1:{port}: another program is using it" in line
    assert faults.pids == []


def test_a_missing_model_is_reported_before_the_external_engine_starts(run_folder: Path) -> None:
    faults = FaultFile(run_folder)
    line = refusal_of(run_folder, faults, "/no/such", "--backend", "vllm", *options(faults))
    assert "no file and no pulled model is called '/no/such'" in line
    assert faults.pids == []


async def test_an_external_engine_that_serves_another_model_or_hangs_is_not_ready(
    run_folder: Path,
) -> None:
    """Side by side, as each takes all of its time."""
    expected = {
        "it serves another-model, not owner/name": {"lies": True},
        "it takes connections and does not answer": {"hangs": True, "ignores_sigterm": True},
        "has no SGLang: set python to the interpreter": None,
    }
    started, fault_files = [], []
    for number, fault in enumerate(expected.values()):
        folder = run_folder / str(number)
        folder.mkdir()
        fault_files.append(FaultFile(folder, **fault or {}))
        env = fault_files[-1].env if fault is not None else {}
        given = {"env": env, "start_timeout_s": LISTENING_BY_THEN_S, "stop_grace_s": 0.2}
        config = SGLangConfig("owner/name", port=0, **given)
        started.append(SGLangBackend(config).start())
    told = await asyncio.gather(*started, return_exceptions=True)
    for text, error in zip(expected, told, strict=True):
        assert isinstance(error, ModelError) and text in str(error), error
    assert all(left_behind(run_folder, each) == [] for each in fault_files)


async def test_an_external_program_that_hangs_is_given_up_after_start_timeout_s(
    run_folder: Path,
) -> None:
    """Also where it is asked for its version, as nothing is known of it."""
    program, noted = run_folder / "python", run_folder / "pids"
    program.write_text(f"#!/bin/sh\necho $$ >> {noted}\nexec sleep 600\n")
    program.chmod(0o700)
    config = VLLMConfig("owner/name", port=0, python=str(program), start_timeout_s=START_TIMEOUT_S)
    with pytest.raises(ModelError, match="vLLM was not ready after 1 s"):
        await VLLMBackend(config).start()
    pids = [int(line) for line in noted.read_text().split()]
    assert pids
    await asyncio.to_thread(wait_until, lambda: all(map(is_gone, pids)))


def test_a_killed_server_leaves_nothing_behind(run_folder: Path) -> None:
    faults = FaultFile(run_folder, grandchild="session", ignores_sigterm=True)
    given = ("owner/name", "--backend", "vllm", *options(faults))
    with serve(*given) as server:
        assert left_behind(run_folder, faults)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: left_behind(run_folder, faults) == [])


def test_the_next_start_removes_what_a_killed_launcher_left(run_folder: Path) -> None:
    faults = FaultFile(run_folder)
    given = ("owner/name", "--backend", "vllm", *options(faults))
    with serve(*given) as server:
        launcher = psutil.Process(server.process.pid).children()[0]
        launcher.suspend()
        os.kill(server.process.pid, signal.SIGKILL)
        launcher.kill()
        wait_until(lambda: all(map(is_gone, faults.pids)))
        assert left_behind(run_folder, faults)  # the socket's folder, and the record of it
    faults.set(load_s=0.1)
    with serve(*given, "--name", "mine") as server:
        assert server.model == "mine"
        server.wait_until(lambda: any('"model": "mine"' in line for line in server.log))
    assert left_behind(run_folder, faults) == []
