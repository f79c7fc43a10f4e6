"""Runs the suite, in an environment of its own.

    python -m tests.vllm_suite [PYTEST_ARGUMENTS]

vLLM's tests are taken from the repository that `VLLM_REPOSITORY` names, by default GitHub's.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from engine.core.store.catalogue import DEFAULT_MODEL
from engine.core.store.model_store import resolve_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "vllm_suite"
HERE = Path(__file__).parent
REPOSITORY = os.environ.get("VLLM_REPOSITORY", "https://github.com/vllm-project/vllm")
TAG = "v0.27.1"
PARTS = ("tests/__init__.py", "tests/entrypoints/__init__.py", "tests/entrypoints/conftest.py")
TESTS = "tests/entrypoints/openai"
PACKAGES = (
    *("openai==3.51.0", "pytest==9.2.0", "pytest-asyncio==1.5.0", "pytest-timeout==2.4.0"),
    *("torch==2.13.0", "transformers==5.23.0", "gguf", "regex", "jsonschema", "requests"),
    *("pybase64", "httpx", "pydantic", "psutil"),
)


def environment() -> Path:
    """The suite's Python. The first call installs the packages."""
    python = FOLDER / "env" / "bin" / "python"
    stamp = FOLDER / "env" / "packages.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(PACKAGES):
        shutil.rmtree(FOLDER / "env", ignore_errors=True)
        venv.create(FOLDER / "env", with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        stamp.write_text("\n".join(PACKAGES))
    return python


def sources() -> Path:
    """A folder with vLLM's tests and our launcher."""
    folder = FOLDER / TAG
    if not folder.exists():
        partial = FOLDER / f"{TAG}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        clone = ["git", "clone", "--quiet", "--depth", "1", "--branch", TAG, "--no-checkout"]
        subprocess.run([*clone, "--filter=blob:none", REPOSITORY, str(partial)], check=True)
        checkout = ["git", "-C", str(partial), "checkout", "--quiet", TAG, "--", *PARTS, TESTS]
        subprocess.run(checkout, check=True)
        partial.rename(folder)
    shutil.copy(HERE / "launcher.py", folder / "tests" / "utils.py")
    return folder


def main() -> int:
    python, folder = environment(), sources()
    told = {
        "VLLM_SUITE_ENGINE": str(Path(sys.executable).with_name("engine")),
        "VLLM_SUITE_MODEL": str(resolve_model(DEFAULT_MODEL)),
        "VLLM_SUITE_RESULTS": str(FOLDER / "results.txt"),
        "PYTHONPATH": str(HERE),
        "HF_HUB_OFFLINE": "1",
    }
    options = ["-c", os.devnull, "--rootdir", str(folder), "-q", "--tb=short", "--timeout", "600"]
    command = [str(python), "-m", "pytest", "-p", "plugin", *options]
    arguments = sys.argv[1:] or [TESTS]
    return subprocess.run([*command, *arguments], cwd=folder, env=os.environ | told).returncode


if __name__ == "__main__":
    sys.exit(main())
