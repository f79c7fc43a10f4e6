"""Misbehaving parsers, as validators for `engine.core.sandbox.checkpoint_validation`: what a
hostile file might make a parser do.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine.core.errors import ModelError
from engine.core.sandbox.checkpoint_validation import MAX_OUTPUT_BYTES
from tests.support.fakes.quick_engine import begun_file

Passed = Callable[[], None]


def nothing(path: Path, passed: Passed) -> None:
    pass


def find(path: Path, passed: Passed) -> bytes:
    return b"found" * 100_000  # more than a pipe holds


def find_too_much(path: Path, passed: Passed) -> bytes:
    return bytes(MAX_OUTPUT_BYTES + 1)


def refuse(path: Path, passed: Passed) -> None:
    raise ModelError("there is no model in it")


def fill_memory(path: Path, passed: Passed) -> None:
    bytearray(6 << 30)  # above the limit, but below what most machines have


def spin(path: Path, passed: Passed) -> None:
    while True:
        pass


def sleep(path: Path, passed: Passed) -> None:
    time.sleep(60)


def crash(path: Path, passed: Passed) -> None:
    os.abort()


def connect(path: Path, passed: Passed) -> None:
    socket.create_connection(("127.0.0.1", 9), timeout=1)


def run_program(path: Path, passed: Passed) -> None:
    subprocess.run([sys.executable, "-c", "pass"])


def write_file(path: Path, passed: Passed) -> None:
    (path.parent / "canary").write_text("x")


def open_many(path: Path, passed: Passed) -> None:
    kept = [open(path, "rb") for _ in range(4096)]  # noqa: SIM115
    assert kept


def hold_three_files(path: Path, passed: Passed) -> None:
    held = os.listdir("/dev/fd")
    if len(held) > 4:  # the fourth descriptor is the folder that is being listed
        raise ModelError(f"{len(held)} open files")


def pass_and_wait(path: Path, passed: Passed) -> bytes:
    """Ends when an engine process has begun with the model, which it must not before `passed`."""
    time.sleep(0.5)
    if begun_file(path).exists():
        raise ModelError("the engine did not wait")
    passed()
    given_up = time.monotonic() + 30
    while not begun_file(path).exists():
        if time.monotonic() > given_up:
            raise ModelError("the engine did not begin")
        time.sleep(0.01)
    time.sleep(0.5)
    return b"found"


def refuse_late(path: Path, passed: Passed) -> None:
    passed()
    raise ModelError("its text is bad")
