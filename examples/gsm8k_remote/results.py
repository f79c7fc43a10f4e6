"""Results that a run can be resumed from: a line for each question, written as it ends."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True)
class Result:
    run: str  # the same for lines that may be counted together
    question: str
    expected: str
    predicted: str | None
    is_correct: bool
    has_form: bool  # it gave its number after ####
    num_tokens: int
    answer: str


def read_results(path: Path, run: str) -> dict[str, Result]:
    """Results by question. Exits if they are another run's."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    found: dict[str, Result] = {}
    for number, line in enumerate(lines, 1):
        try:
            result = Result(**json.loads(line))
        except (ValueError, TypeError):
            if number == len(lines):  # a run was ended in the middle of it
                break
            raise SystemExit(f"error: {path}, line {number} is no result") from None
        if result.run != run:
            raise SystemExit(
                f"error: {path} has results of another run ({result.run}); give another --output"
            )
        found[result.question] = result
    return found


def open_results(path: Path, kept: dict[str, Result]) -> TextIO:
    """For more lines; what is kept is written again, without a half line that a crash left."""
    file = path.open("w", encoding="utf-8")
    for result in kept.values():
        write_result(file, result)
    return file


def write_result(file: TextIO, result: Result) -> None:
    file.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")
    file.flush()
