"""Installs this source tree into a virtual environment: packages, while the kernels are compiled.

    deploy/install.py PYTHON [EXTRA ...]

PYTHON is the environment's interpreter. It uses uv if that is installed, otherwise pip, which
compiles no module: Python compiles what it imports. Neither shows what a build prints, so a line
follows the object files. This script needs nothing but Python.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
POLL_S = 0.5


def main(python: str, *extras: str) -> int:
    started = time.time()
    command = installer(python)
    # pip is for what the user adds later: an environment that is made without it is made at once.
    packages = [*command, *requirements(extras), "pip"]
    kernels = [*command, "--no-deps", "--editable", str(ROOT)]
    # Makefiles, which CMake writes without ninja, are otherwise run one command at a time.
    variables = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1), **os.environ}
    running = [subprocess.Popen(each, env=variables) for each in (packages, kernels)]
    try:
        while any(each.poll() is None for each in running):
            show(progress(started, has_packages=running[0].poll() is not None))
            time.sleep(POLL_S)
    except KeyboardInterrupt:  # they got it too
        for each in running:
            each.wait()
    show("")
    failed = [shlex.join(map(str, each.args)) for each in running if each.returncode]
    for line in failed:
        print(f"This failed: {line}", file=sys.stderr)
    if not failed:
        print(f"Installed in {time.time() - started:.0f} s.", flush=True)
    return 1 if failed else 0


def requirements(extras: tuple[str, ...]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


def installer(python: str) -> list[str]:
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--quiet", "--python", python]
    quiet = ["install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--python", python, *quiet]
    subprocess.run([python, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL)
    return [python, "-m", "pip", *quiet]


def progress(started: float, *, has_packages: bool) -> str:
    """Of the build that runs, if CMake has begun one."""
    parts = [f"{time.time() - started:.0f} s", "packages: " + ("done" if has_packages else "...")]
    lists = list((ROOT / "build").glob("*/compile_commands.json"))
    if lists:
        newest = max(lists, key=lambda each: each.stat().st_mtime)
        objects = newest.parent.rglob("*.o")
        done = sum(each.stat().st_mtime >= started for each in objects)
        count = len({each["file"] for each in json.loads(newest.read_text(encoding="utf-8"))})
        parts.append(f"kernels: {done} of {count} files")
    return ", ".join(parts)


def show(line: str) -> None:
    """On a terminal, in place of the last one."""
    if sys.stdout.isatty():
        print(f"\r{line}\x1b[K", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
