"""The probes of a live server tell the truth: of an engine that is frozen, that fails to start, and
that is only busy.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from engine.core import faults
from engine.core.faults import Fault
from tests.e2e.engines.test_sharing_and_faults import complete, stream_events
from tests.support.servers.served import serve

MODEL = "smollm2-135m-instruct"


def until_health(server, status: int, seconds: float) -> float:
    began = time.monotonic()
    server.wait_until(lambda: httpx.get(f"{server.url}/health").status_code == status, seconds)
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_frozen_engine_is_503_on_health_within_5_s(default_model, is_busy: bool):
    with serve(MODEL) as server:
        outcomes: list[str] = []
        args = (server.url, server.model, 1, 400, outcomes)
        thread = threading.Thread(target=stream_events, args=args)
        if is_busy:
            thread.start()
            server.wait_until(lambda: server.metric("engine_sequences_running") == 1)
        os.kill(server.engine_pid(), signal.SIGSTOP)
        assert until_health(server, 503, 10) < 5
        assert httpx.get(f"{server.url}/readyz").status_code == 503
        assert httpx.get(f"{server.url}/livez").status_code == 200
        assert until_health(server, 200, 30) < 15
        if is_busy:
            thread.join(60)
            assert outcomes == ["[DONE]"], "it went on where it was frozen"
        assert complete(server, "The sky is")["usage"]["completion_tokens"] == 4
        assert server.metric("engine_restarts_total") == 0


@pytest.mark.slow
def test_full_load_raises_no_health_alarm(default_model):
    with serve(MODEL) as server:
        statuses, done = set(), threading.Event()

        def probe() -> None:
            while not done.wait(0.1):
                statuses.add(httpx.get(f"{server.url}/health", timeout=30).status_code)

        probing = threading.Thread(target=probe)
        probing.start()
        outcomes: list[str] = []
        threads = [
            threading.Thread(target=stream_events, args=(server.url, server.model, n, 60, outcomes))
            for n in range(48)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        probing.join()
        assert statuses == {200} and outcomes == ["[DONE]"] * 48


def run_serve(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "serve", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_taken_port_is_exit_code_2_before_anything_is_loaded(default_model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_serve(MODEL, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2 and "another program" in done.stderr
    assert "Loading" not in done.stderr and "Traceback" not in done.stderr


def test_a_truncated_model_file_is_reported_in_one_line(default_model: Path, tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    shutil.copy(default_model, broken)
    os.truncate(broken, broken.stat().st_size // 2)
    done = run_serve(str(broken), "--port", "0")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 1 and len(errors) == 1, done.stderr


@pytest.mark.parametrize("action", ["raise", "exit"])
def test_an_engine_that_fails_to_load_ends_the_server_with_a_failure(default_model, action):
    done = run_serve(MODEL, "--port", "0", **faults.environment(Fault("load", action)))
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 1 and len(errors) == 1, done.stderr
