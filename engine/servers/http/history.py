"""Keeps the records of the last generation requests, so that they can be explained."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.interfaces.notes import RequestNotes
    from engine.servers.http.recorder import Recorder
    from engine.servers.http.request_log import RequestRecord


# Max seconds that `find` waits for a request whose answer is written, but not yet accounted.
MAX_ENDING_S = 10.0


class RequestHistory:
    """The records of the last requests that have ended. Records have no text of a request. With a
    `recorder`, the tokens of requests are stored, too.

    If there are too many records, the oldest one goes of the tenant that has most. So a flood of
    one tenant's requests leaves those of others.
    """

    def __init__(self, max_records: int = 0, recorder: "Recorder | None" = None) -> None:
        self._max_records = max_records
        self._records: dict[int, RequestRecord] = {}  # by number, the oldest first
        self._numbers: dict[str, deque[int]] = {}  # of each tenant's records, the oldest first
        self._next = count()
        self._open: dict[int, RequestRecord] = {}  # of requests that have not ended, by `id`
        self.recorder = recorder

    def notes_of(self, record: "RequestRecord") -> "RequestNotes | None":
        """What the backend adds to while it runs the request. None if nobody reads it."""
        if self.recorder is not None:
            record.notes.recorded = []
            return record.notes
        is_read = self._max_records != 0 or record.trace is not None
        return record.notes if is_read else None

    def begin(self, record: "RequestRecord") -> None:
        self._open[id(record)] = record

    def end(self, record: "RequestRecord") -> None:
        """Keep the record of a request that has ended, if it was one to a model."""
        del self._open[id(record)]
        if record.completion_id is not None:
            self._add(record)
        if record.ended is not None:
            record.ended.set()

    def _add(self, record: "RequestRecord") -> None:
        number = next(self._next)
        self._records[number] = record
        self._numbers.setdefault(record.tenant, deque()).append(number)
        if len(self._records) > self._max_records:
            self._drop()
        if self.recorder is not None:
            self.recorder.keep(record)

    def _drop(self) -> None:
        numbers = self._numbers
        tenant = max(numbers, key=lambda each: (len(numbers[each]), -numbers[each][0]))
        del self._records[numbers[tenant].popleft()]
        if not numbers[tenant]:
            del numbers[tenant]

    def newest(self, tenant: str | None) -> "Iterator[RequestRecord]":
        """The records, newest first. If `tenant` is given, only those of its requests."""
        if tenant is None:
            return reversed(self._records.values())
        numbers = self._numbers.get(tenant, deque())
        return (self._records[number] for number in reversed(numbers))

    async def find(self, request_id: str, tenant: str | None) -> "RequestRecord | None":
        """The newest record with this id, which is the id of the HTTP request or of the answer. A
        client that has just read the end of an answer finds its record.
        """
        ends = []
        for each in self._open.values():
            if each.is_ending and _is_meant(each, request_id) and tenant in (None, each.tenant):
                each.ended = each.ended or asyncio.Event()
                ends.append(each.ended)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_ENDING_S):
                for end in ends:
                    await end.wait()
        found = (each for each in self.newest(tenant) if _is_meant(each, request_id))
        return next(found, None)


def _is_meant(record: "RequestRecord", request_id: str) -> bool:
    return request_id in (record.request_id, record.completion_id)
