"""Results of an evaluation, one line per answer. A run can be resumed from its file."""

from pathlib import Path
from typing import TextIO

import msgspec

from engine.core.errors import InvalidRequestError


class Result(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    settings: str  # lines count together only if this is the same
    item: str  # the question's id
    digest: str  # of the question
    answer: str
    scores: dict[str, bool]
    num_tokens: int = 0


class ResultFile:
    """Keeps the results of a run, and writes each as it comes if there is a file."""

    def __init__(self, path: Path | None, settings: str) -> None:
        self._path = path
        self._settings = settings
        self._file: TextIO | None = None
        self._kept = {} if path is None else self._read(path)

    def found(self, model: str, digest: str) -> Result | None:
        """The result of an earlier run."""
        return self._kept.get((model, digest))

    def add(self, result: Result) -> None:
        if self._file is None and self._path is not None:
            self._file = self._opened(self._path)
        self._kept[result.model, result.digest] = result
        if self._file is not None:
            self._write(self._file, result)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self, path: Path) -> dict[tuple[str, str], Result]:
        if not path.exists():
            return {}
        lines = path.read_bytes().splitlines()
        kept: dict[tuple[str, str], Result] = {}
        for number, line in enumerate(lines, 1):
            try:
                result = msgspec.json.decode(line, type=Result)
            except msgspec.MsgspecError:
                if number == len(lines):  # a run was ended while it wrote this line
                    break
                raise InvalidRequestError(
                    f"{path}, line {number} is no result of an evaluation", param="output"
                ) from None
            if result.settings != self._settings:
                raise InvalidRequestError(
                    f"{path} has results of another run ({result.settings}); give another --output",
                    param="output",
                )
            kept[result.model, result.digest] = result
        return kept

    def _opened(self, path: Path) -> TextIO:
        """Write again what is kept, without the half line that a crash may have left."""
        file = path.open("w", encoding="utf-8")
        for result in self._kept.values():
            self._write(file, result)
        return file

    def _write(self, file: TextIO, result: Result) -> None:
        file.write(msgspec.json.encode(result).decode() + "\n")
        file.flush()
