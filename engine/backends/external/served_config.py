"""Configuration that is common to all engines that run as child processes."""

import logging
import os
import re
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from engine.backends.base import BackendConfig
from engine.backends.external.listening import HeldPort, Place
from engine.core.errors import ConfigError, NotFoundError
from engine.core.sandbox.processes import start_child
from engine.core.store.model_store import resolve_model
from engine.ipc.child_process import ChildProcess

OUR_SETTINGS = "LLM_ENGINE_"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Environment variables that the child does not get, because they are only valid for our own Python
# interpreter.
_OUR_PYTHON = frozenset({"PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV"})


@dataclass(frozen=True)
class ServedConfig(BackendConfig, ABC):
    """Configuration of an engine in a child process. Subclasses add the options of their engine as
    fields with the engine's names.
    """

    engine_name: ClassVar[str]

    python: str = ""  # Python interpreter that has the engine installed; "" means our own
    env: dict[str, str] = field(default_factory=dict)  # variables added to our own environment
    served_model_name: str | None = None  # id in the child; None: derived from model_name
    tool_call_parser: str | None = None  # an engine's parser; without it, no tool calls
    reasoning_parser: str | None = None  # the engine's parser that separates reasoning from answers
    trust_remote_code: bool = False  # run Python code from the model's repository
    start_timeout_s: float = 600.0  # seconds, including downloads and compilation
    stop_grace_s: float = 10.0  # seconds between SIGTERM and SIGKILL

    @abstractmethod
    def argv(self, model: str | None = None, place: Place | None = None) -> list[str]:
        """The command line that starts the engine. If `model` or `place` is None, the configured
        model or address is used.
        """

    @property
    def api_key(self) -> str | None:
        """The API key that the child requires. It must not be on the command line."""
        return None

    def capabilities(self, known: tuple[str, ...]) -> tuple[str, ...]:
        """The model's capabilities with this configuration. `known` are the capabilities that the
        engine's API has in general.
        """
        found = [name for name in known if name != "tools" or self.tool_call_parser is not None]
        return (*found, "reasoning") if self.reasoning_parser is not None else tuple(found)

    @property
    def takes_gguf(self) -> bool:
        return False

    @property
    def model_id(self) -> str:
        if self.served_model_name is not None:
            return self.served_model_name
        is_path = not _HUB_NAME.fullmatch(self.model_name) or Path(self.model_name).exists()
        return Path(self.model_name).name if is_path else self.model_name

    def interpreter(self) -> str:
        """The interpreter's path. Raises `ConfigError` if there is none."""
        if not self.python:
            return sys.executable
        found = shutil.which(os.path.expanduser(self.python))
        if found is None:
            raise ConfigError(
                f"python: {self.python!r} is not a program that can be run; it must be the Python"
                f" interpreter of an environment that has {self.engine_name}",
                param="python",
            )
        return found

    def resolved_model(self) -> str:
        """The path of the model on this machine, or its name on the Hugging Face hub, from where
        the engine downloads it.
        """
        name = self.model_name
        is_hub_name = bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()
        if is_hub_name:
            return name
        try:
            path = resolve_model(name)
        except NotFoundError as error:
            raise NotFoundError(
                f"{error} (for {self.engine_name}: a folder with a Hugging Face checkpoint,"
                " or owner/name on the hub)"
            ) from None
        if path.suffix.lower() == ".gguf" and not self.takes_gguf:
            raise ConfigError(
                f"{self.engine_name} can't load {path.name}: it takes Hugging Face checkpoints"
                " (a folder with config.json and safetensors, or owner/name on the hub), not GGUF"
                " files. The backends native and torch load this one.",
                param="model",
            )
        return str(path)

    def environment(self) -> dict[str, str]:
        """The child's environment. It does not have our own settings, because these may contain an
        API key.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(OUR_SETTINGS) and name not in _OUR_PYTHON
        }
        # The child may need tools that are installed in the interpreter's folder.
        folder = str(Path(self.interpreter()).parent)
        kept["PATH"] = os.pathsep.join([folder, kept.get("PATH", os.defpath)])
        # PYTHONSAFEPATH keeps the child from importing modules from our working directory.
        return kept | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"} | self.env


def port_flags(config: BackendConfig, place: Place | None) -> list[str]:
    port = place.port if isinstance(place, HeldPort) else config.port
    return [f"--host={config.host}", f"--port={port}"]


log = logging.getLogger(__name__)

MINIMUM = {"vllm": "0.23.1", "sglang": "0.5.0"}
LOOK_UP = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
LOOK_UP_TIMEOUT_S = 20.0


async def warn_if_old(package: str, interpreter: str, environment: Mapping[str, str]) -> None:
    """Warn if the version of the package in this interpreter is too old. If the package is not
    installed, the start of the engine reports that.
    """
    found = await _installed(package, interpreter, environment)
    if found is not None and _parts(found) < _parts(MINIMUM[package]):
        log.warning(
            "%s %s has known security holes that %s has not: update it in the environment of %s",
            package,
            found,
            MINIMUM[package],
            interpreter,
        )


async def _installed(package: str, interpreter: str, environment: Mapping[str, str]) -> str | None:
    with tempfile.TemporaryFile() as output:
        argv = [interpreter, "-c", LOOK_UP, package]
        try:
            child = ChildProcess(start_child(argv, (), env=environment, output=output.fileno()))
        except OSError:
            return None
        try:
            status = await child.stop(LOOK_UP_TIMEOUT_S)
        finally:
            child.kill()
        output.seek(0)
        lines = output.read().decode(errors="replace").split()
    return lines[-1] if status == 0 and lines else None


def _parts(version: str) -> tuple[int, ...]:
    """The first three numbers of a version. The rest is ignored."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    return tuple((numbers + [0, 0, 0])[:3])
