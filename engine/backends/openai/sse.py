"""Server-sent events out of bytes that arrive in any pieces.

Only their data is looked at; comments, names and ids are left out. Lines may end with LF, CRLF or
CR.
"""

from engine.core.errors import UnavailableError

MAX_EVENT_BYTES = 16 * 2**20


class EventLines:
    """`push` gives the data of every event that has become whole."""

    def __init__(self) -> None:
        self._rest = b""  # the line that has not ended yet
        self._data: list[bytes] = []  # of the event that has not
        self._num_bytes = 0

    def push(self, piece: bytes) -> list[bytes]:
        text = self._rest + piece
        if b"\r" in text:
            text = self._with_line_feeds(text)
        lines = text.split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._num_bytes += len(line)
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
                self._num_bytes = 0
        if self._num_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise UnavailableError("The model's server sent an event that is too large.")
        return events

    def _with_line_feeds(self, text: bytes) -> bytes:
        """A last CR stays as it is: an LF may follow, which belongs to it."""
        ends_open = text.endswith(b"\r")
        body = text[:-1] if ends_open else text
        return body.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (b"\r" if ends_open else b"")
