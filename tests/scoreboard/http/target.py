"""Servers in separate processes, with a client key and an administrator's key, for figures that
send requests.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from engine.core.key_file import add_key
from tests.conftest import DEFAULT_MODEL
from tests.support.fakes.fake_backend import MODEL as FAKE_MODEL
from tests.support.servers.live_server import wait_until
from tests.support.servers.served import serve

KEY = "scoreboard-key-0123456789abcdef"
ADMIN_KEY = "scoreboard-admin-key-0123456789"
CLIENT = {"authorization": f"Bearer {KEY}"}
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
MAX_ERROR_BYTES = 8192
# Wrong keys are part of the test; throttling them is measured elsewhere.
NO_THROTTLE = 1_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """A running server."""

    url: str
    model: str
    process: subprocess.Popen[Any]

    def key_for(self, path: str) -> dict[str, str]:
        """The headers of a client that may use this path."""
        return ADMIN if path.startswith("/v1/admin/") else CLIENT

    def description(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/openapi.json", headers=CLIENT).json())

    def children(self) -> set[int]:
        return {each.pid for each in psutil.Process(self.process.pid).children(recursive=True)}

    def processor_s(self) -> float:
        """CPU time of its own threads."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def is_healthy(self) -> bool:
        return httpx.get(f"{self.url}/health", timeout=20).status_code == 200

    def ask(self, command: str, argument: Any = None) -> str:
        """Send a command to a server run by `http_server`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        words = command if argument is None else f"{command} {json.dumps(argument)}"
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return str(self.process.stdout.readline()).strip()


@contextmanager
def held_server(*, native: bool = False, **sections: dict[str, Any]) -> Iterator[Target]:
    """Our server over a fake backend, or over the default model."""
    with tempfile.TemporaryDirectory() as home:
        keys_file = Path(home, "keys.json")
        add_key(keys_file, "another")
        server = {"api_key": KEY, "admin_key": ADMIN_KEY, "keys_file": str(keys_file)}
        settings = {
            **sections,
            "native": native,
            "server": server | sections.get("server", {}),
            "limits": {"auth_failures_per_minute": NO_THROTTLE},
            "storage": {"path": home},
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.scoreboard.http.server", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, "the server did not start"
            wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200, 60)
            yield Target(url, DEFAULT_MODEL if native else FAKE_MODEL, process)
        finally:
            process.communicate(timeout=30)


@contextmanager
def served_default_model(*arguments: str) -> Iterator[Target]:
    """`engine serve`, started as a user would."""
    with tempfile.TemporaryDirectory() as home:
        env = {
            "LLM_ENGINE_API_KEY": KEY,
            "LLM_ENGINE_ADMIN_KEY": ADMIN_KEY,
            "LLM_ENGINE_LIMITS__AUTH_FAILURES_PER_MINUTE": str(NO_THROTTLE),
            "XDG_DATA_HOME": home,
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }
        with serve(DEFAULT_MODEL, *arguments, env=env) as served:
            yield Target(served.url, DEFAULT_MODEL, served.process)
