"""Runs walks of `walk.mjs`, and keeps the plans of those that fail."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
KEPT = FOLDER / "kept.json"
MODULES = FOLDER.parents[2] / "build" / "ui"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Walker:
    """A browser in which walks are done, one after the other."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        command = ["node", FOLDER / "walk.mjs", MODULES, CHROMIUM]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def walk(self, given: dict[str, Any]) -> dict[str, Any] | None:
        """What differs from the model in a walk, with its plan, or None. `given` is `{seed, steps}`
        or `{plan}`; with `shrink`, the plan is made shorter.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{json.dumps(given)}\n")
        stdin.flush()
        answer = stdout.readline()
        assert answer, "the walk has ended"
        failure: dict[str, Any] | None = json.loads(answer)
        return failure

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def kept_plans() -> list[dict[str, Any]]:
    plans: list[dict[str, Any]] = json.loads(KEPT.read_text())
    return plans


def keep(plan: list[Any], seed: int) -> None:
    lines = [json.dumps(each) for each in (*kept_plans(), {"seed": seed, "plan": plan})]
    KEPT.write_text("[\n" + ",\n".join(lines) + "\n]\n")
