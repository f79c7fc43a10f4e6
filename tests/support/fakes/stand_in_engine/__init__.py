"""A program that stands in for vLLM or SGLang: the same command lines, endpoints and manners, over
a model that knows ten words, and faults on demand.

`FaultFile.env` makes an interpreter find it in place of the real package: whatever starts
`python -m vllm.entrypoints.cli.main serve ...` or `python -m sglang.launch_server ...` gets it.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.fakes.stand_in_engine.faults import FAULTS_FILE, Faults

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


class FaultFile:
    """What the stand-in does wrong, read by each run as it starts, and again at every request."""

    def __init__(self, folder: Path, **faults: Any) -> None:
        self.path = folder / "faults.json"
        self.set(**faults)

    def set(self, **faults: Any) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(asdict(Faults(**faults))))
        part.rename(self.path)

    @property
    def env(self) -> dict[str, str]:
        return {FAULTS_FILE: str(self.path), "PYTHONPATH": f"{FOLDER / 'modules'}:{ROOT}"}

    @property
    def pids(self) -> list[int]:
        """Of every process that any run started, the runs' own first ones included."""
        found = self.path.with_suffix(".pids")
        return [int(line) for line in found.read_text().split()] if found.exists() else []
