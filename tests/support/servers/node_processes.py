"""Servers and nodes as processes, started by the commands that users run."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 120.0
READY = r"Ready in .* at (https?://\S+)/v1"


class Running:
    """A command that runs, with the lines of its log."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())

    def told(self, pattern: str, seconds: float = START_TIMEOUT_S) -> re.Match[str]:
        """Wait for a line of the log."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for line in self.log:
                if match := re.search(pattern, line):
                    return match
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"no line has {pattern}: " + "\n".join(self.log))

    def ended(self, seconds: float = 60.0) -> tuple[int, str]:
        """Wait for the end. Returns the exit status and the log."""
        status = self.process.wait(seconds)
        self._reader.join(10)
        return status, "\n".join(self.log)

    def kill(self) -> None:
        """Kill the command and its engine at once."""
        os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def running(*arguments: str, **variables: str) -> Iterator[Running]:
    """Run `engine ARGUMENTS` until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.cli.main", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
        start_new_session=True,
    )
    try:
        yield Running(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def token_file(folder: Path, token: str = "a-token-that-nodes-share") -> str:
    path = folder / f"{token[:8]}.token"
    path.write_text(token)
    path.chmod(0o600)
    return str(path)


def certify(folder: Path, name: str, signer: str | None = None) -> tuple[str, str]:
    """Make a certificate for 127.0.0.1, signed by `signer` or by itself. Returns its files."""
    files = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    by = ["-CA", f"{signer}.pem", "-CAkey", f"{signer}.key"] if signer else []
    is_ca = "CA:FALSE" if signer else "CA:TRUE"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *by]
        + ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-out", files[0], "-keyout", files[1]]
        + [
            "-addext",
            f"basicConstraints=critical,{is_ca}",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )
    return files


class Wire:
    """Forwards connections from 127.0.0.2 to the same port of 127.0.0.1. `change` gets the bytes
    that come back and how many came before, and returns what the client gets.
    """

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.change: Callable[[bytes, int], bytes] = lambda data, before: data
        self.num_bytes = 0
        self._server = socket.create_server(("127.0.0.2", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                near.close()
                continue
            for args in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._forward, args=args, daemon=True).start()

    def _forward(self, source: Any, target: Any, is_answer: bool) -> None:
        try:
            while data := source.recv(4096):
                if is_answer:
                    size = len(data)
                    data = self.change(data, self.num_bytes)
                    self.num_bytes += size
                target.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            target.close()
