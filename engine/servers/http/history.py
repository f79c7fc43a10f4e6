"""Keeps the records of the last generation requests, so that they can be explained."""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.interfaces.notes import RequestNotes
    from engine.servers.http.recorder import Recorder
    from engine.servers.http.request_log import RequestRecord


class RequestHistory:
    """The records of the last requests that have ended. Records have no text of a request. With a
    `recorder`, the tokens of requests are stored, too.
    """

    def __init__(self, max_records: int = 0, recorder: "Recorder | None" = None) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=max_records)
        self.recorder = recorder

    def notes_of(self, record: "RequestRecord") -> "RequestNotes | None":
        """What the backend adds to while it runs the request. None if nobody reads it."""
        if self.recorder is not None:
            record.notes.recorded = []
            return record.notes
        is_read = self._records.maxlen != 0 or record.trace is not None
        return record.notes if is_read else None

    def add(self, record: "RequestRecord") -> None:
        self._records.append(record)
        if self.recorder is not None:
            self.recorder.keep(record)

    def newest(self, tenant: str | None) -> "Iterator[RequestRecord]":
        """The records, newest first. If `tenant` is given, only those of its requests."""
        return (each for each in reversed(self._records) if tenant in (None, each.tenant))

    def find(self, request_id: str, tenant: str | None) -> "RequestRecord | None":
        """The newest record with this id, which is the id of the HTTP request or of the answer."""
        for each in self.newest(tenant):
            if request_id in (each.request_id, each.completion_id):
                return each
        return None
