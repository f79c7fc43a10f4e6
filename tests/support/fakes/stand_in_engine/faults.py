"""What a stand-in can be told to do wrong."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

FAULTS_FILE = "STAND_IN_FAULTS"


@dataclass(frozen=True)
class Faults:
    exit_at_start: int | None = None  # with this status, after an error message
    said: str = ""  # on standard error, before anything else
    num_noise_lines: int = 0
    load_s: float = 0.0  # until it listens
    is_never_ready: bool = False  # /health answers 503
    lies: bool = False  # /health answers 200, but another model is served
    hangs: bool = False  # takes connections and never answers
    ignores_sigterm: bool = False
    grandchild: str = ""  # "plain", or "session": in a session of its own
    token_s: float = 0.0
    crash_after: int | None = None  # events of a stream
    stall_after: int | None = None


def read_faults() -> Faults:
    path = os.environ.get(FAULTS_FILE)
    return Faults(**json.loads(Path(path).read_text())) if path else Faults()


def note_pid(pid: int) -> None:
    if path := os.environ.get(FAULTS_FILE):
        with open(Path(path).with_suffix(".pids"), "a") as file:
            file.write(f"{pid}\n")
