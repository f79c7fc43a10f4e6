"""A real Redis server for tests, on a Unix socket in a folder of its own."""

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import redis

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.start()

    def start(self) -> None:
        assert PROGRAM is not None
        self.socket.unlink(missing_ok=True)
        fixed = ("--port", "0", "--unixsocket", str(self.socket), "--save", "")
        self.process = subprocess.Popen(
            [PROGRAM, *fixed, "--dir", str(self._folder), *self._options],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < deadline and self.process.poll() is None, "no Redis"
            time.sleep(0.01)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), **options)

    def _answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except redis.ConnectionError:
            return False
