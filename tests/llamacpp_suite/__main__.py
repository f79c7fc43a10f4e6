"""Runs the suite: `python -m tests.llamacpp_suite [ARGUMENTS OF PYTEST]`.

Its tests run in an environment of their own, because they need packages that we do not.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

from tests.llamacpp_suite.models import FOLDER, prepare

ROOT = Path(__file__).parents[2]
PACKAGES = ("aiohttp", "filelock", "numpy", "openai", "pytest>=8", "requests", "wget")


def launcher() -> Path:
    """A program that starts our server from the flags of llama.cpp's server."""
    path = FOLDER / "llama-server"
    command = f'"{sys.executable}" -m tests.llamacpp_suite.launcher "$@"'
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec {command}\n')
    path.chmod(0o755)
    return path


def environment() -> Path:
    """The interpreter of the suite's own environment, which is built on first use."""
    folder = FOLDER / "venv"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return python


def main() -> int:
    tests = prepare() / "tools" / "server" / "tests"
    options = ["-p", "no:cacheprovider", "-p", "tests.llamacpp_suite.plugin", "-m", "not slow"]
    variables = {"LLAMA_SERVER_BIN_PATH": str(launcher()), "PYTHONPATH": str(ROOT)}
    given = sys.argv[1:] or ["-q", "--tb=short"]
    command = [str(environment()), "-m", "pytest", *options, *given]
    return subprocess.run(command, cwd=tests, env=os.environ | variables).returncode


if __name__ == "__main__":
    sys.exit(main())
