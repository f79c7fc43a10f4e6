"""Forwards the output of a child process to our log, under the child's name.

A child may write very fast. Lines above a rate limit are counted but not logged. The last lines,
logged or not, are kept to explain a crash.
"""

import asyncio
import codecs
import logging
import re
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_LINE = 2000  # characters
KEPT_LINES = 200
LINES_PER_S = 50.0
BURST_LINES = 400.0
SHORT_LINE = 160

_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
# Text that loggers write before a message: process name, level, time, code location.
_PREFIX = re.compile(
    r"^(\([\w-]+ pid=\d+\) )?(\[[\d:. TP-]+[^]]*\] )?"
    r"((DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s+)?([\d:.-]+ [\d:.,]+ )?(\[[\w./]+:\d+\] )?"
)
_CAUSE = re.compile(r"(?:\b[A-Z]\w*(?:Error|Exception|Exit|Interrupt)|\berror|\bfatal): \S.*", re.A)


class ChildLog:
    """The output of all runs of one child. `begin` returns the receiver for the next run."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._kept: deque[str] = deque(maxlen=KEPT_LINES)
        self._allowance = BURST_LINES
        self._allowed_at = clock()
        self._num_left_out = 0

    def begin(self) -> "ChildOutput":
        """Returns the receiver for the output of the next run. Drops the lines that were kept."""
        self._kept.clear()
        return ChildOutput(self.take)

    @property
    def last_line(self) -> str:
        """The last line of output, shortened. Empty if there is none."""
        return _short(_PREFIX.sub("", self._kept[-1])) if self._kept else ""

    @property
    def cause(self) -> str:
        """The line that best explains why the child ended. This is the first error, because later
        errors are usually consequences. If there is no error, it is the last line.
        """
        for line in self._kept:
            is_harmless = _level(line) in (logging.DEBUG, logging.INFO, logging.WARNING)
            if not is_harmless and (found := _CAUSE.search(line)):
                return _short(found.group(), 2 * SHORT_LINE)
        return self.last_line

    def mentions(self, text: str) -> bool:
        return any(text in line for line in self._kept)

    def take(self, line: str) -> None:
        line = line.rstrip()[:MAX_LINE]
        if not line:
            return
        self._kept.append(line)
        now = self._clock()
        earned = (now - self._allowed_at) * LINES_PER_S
        self._allowance = min(BURST_LINES, self._allowance + earned)
        self._allowed_at = now
        if self._allowance < 1:
            self._num_left_out += 1
            return
        self._allowance -= 1
        self._tell_left_out()
        log.log(_level(line) or logging.INFO, "[%s] %s", self._name, line)

    def _tell_left_out(self) -> None:
        count, self._num_left_out = self._num_left_out, 0
        if count:
            log.warning("[%s] %d lines left out: it writes too much", self._name, count)


class ChildOutput(asyncio.Protocol):
    """Splits the output of one run into lines. `closed` is set when no process can write to the
    output any more.
    """

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        text = self._rest + self._decoder.decode(data)
        *lines, self._rest = re.split(r"[\r\n]+", text)  # progress bars use CR instead of LF
        if len(self._rest) > MAX_LINE:
            lines.append(self._rest)
            self._rest = ""
        for line in lines:
            self._take(line)

    def connection_lost(self, exc: Exception | None) -> None:
        self._take(self._rest)
        if not self.closed.done():
            self.closed.set_result(None)


def _level(line: str) -> int | None:
    """The log level named in a line. None if there is none."""
    found = _LEVEL.search(line[:120])
    return logging.getLevelNamesMapping()[found[1]] if found else None


def _short(text: str, length: int = SHORT_LINE) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."
