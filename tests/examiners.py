"""Misbehaving parsers, as examiners for `engine.core.sandbox.examination`: what a hostile file
might make a parser do.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from engine.core.errors import ModelError
from engine.core.sandbox.examination import MAX_OUTPUT_BYTES


def nothing(path: Path) -> None:
    pass


def find(path: Path) -> bytes:
    return b"found" * 100_000  # more than a pipe holds


def find_too_much(path: Path) -> bytes:
    return bytes(MAX_OUTPUT_BYTES + 1)


def refuse(path: Path) -> None:
    raise ModelError("there is no model in it")


def fill_memory(path: Path) -> None:
    bytearray(6 << 30)  # above the limit, but below what most machines have


def spin(path: Path) -> None:
    while True:
        pass


def sleep(path: Path) -> None:
    time.sleep(60)


def crash(path: Path) -> None:
    os.abort()


def connect(path: Path) -> None:
    socket.create_connection(("127.0.0.1", 9), timeout=1)


def run_program(path: Path) -> None:
    subprocess.run([sys.executable, "-c", "pass"])


def write_file(path: Path) -> None:
    (path.parent / "canary").write_text("x")


def open_many(path: Path) -> None:
    kept = [open(path, "rb") for _ in range(4096)]  # noqa: SIM115
    assert kept


def hold_three_files(path: Path) -> None:
    held = os.listdir("/dev/fd")
    if len(held) > 4:  # the fourth descriptor is the folder that is being listed
        raise ModelError(f"{len(held)} open files")
