"""A strict parser of server-sent events.

It reports errors that a lenient parser hides but that break simple clients: lines without a field,
bytes that are not UTF-8, and an event without its final blank line.
"""

import json
from dataclasses import dataclass
from typing import Any

import httpx

from engine_tools.conformance.expect import RuleFailed

DONE = "[DONE]"
_FIELDS = frozenset({"data", "event", "id", "retry"})


@dataclass(frozen=True, slots=True)
class SseEvent:
    name: str | None
    data: str


@dataclass(frozen=True, slots=True)
class SseStream:
    """A complete stream of events. `problems` are violations of the server-sent events format
    itself.
    """

    headers: httpx.Headers
    events: tuple[SseEvent, ...]
    problems: tuple[str, ...]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The parsed JSON of every event except the final `[DONE]`."""
        return [_parsed(event.data) for event in self.events if event.data != DONE]

    @property
    def num_done(self) -> int:
        return sum(event.data == DONE for event in self.events)


def _parsed(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise RuleFailed(f"an event's data is not JSON: {data[:60]!r}") from None
    if not isinstance(value, dict):
        raise RuleFailed(f"an event's data is not an object: {data[:60]!r}")
    if value.get("error"):
        raise RuleFailed(f"the stream ended with an error: {data[:200]}")
    return value


def read_stream(headers: httpx.Headers, raw: bytes) -> SseStream:
    problems: list[str] = []
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        problems.append(f"byte {error.start} is not UTF-8")
        text = raw.decode(errors="replace")
    events: list[SseEvent] = []
    name: str | None = None
    data: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append(SseEvent(name, "\n".join(data)))
            name, data = None, []
        elif not field:  # an empty field name marks a comment
            continue
        elif field not in _FIELDS:
            problems.append(f"a line that is no field: {line[:60]!r}")
        elif field == "event":
            name = value
        elif field == "data":
            if not value:
                problems.append("an empty data line")
            data.append(value)
    if data:
        problems.append("the last event is not ended by an empty line")
        events.append(SseEvent(name, "\n".join(data)))
    return SseStream(headers, tuple(events), tuple(problems))
