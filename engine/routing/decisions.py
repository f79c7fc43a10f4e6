"""Keeps recent routing decisions, which say why each request was sent to its replica."""

import time
from collections import OrderedDict, deque
from typing import Any

import msgspec

MAX_DECISIONS = 1024
# Max prompts of one HTTP request. Each prompt is a backend request of its own, with a number at the
# end of its id.
MAX_PARTS = 128


class Candidate(msgspec.Struct, frozen=True):
    name: str
    state: str
    score: float | None
    why_not: str | None  # why this replica was not chosen; None if it was chosen
    why: str = ""


class Failed(msgspec.Struct, frozen=True):
    """A failed attempt: the name of the replica, its error, and how long the attempt took."""

    backend: str
    error: str
    seconds: float = 0.0


class Decision(msgspec.Struct, kw_only=True):
    """The decision about one request, with the candidates of its last attempt."""

    request_id: str
    http_request_id: str
    model: str
    policy: str
    chosen: str | None = None
    why: str = ""
    candidates: tuple[Candidate, ...] = ()
    attempts: int = 0
    failed: tuple[Failed, ...] = ()
    has_answered: bool = False  # whether the replica `chosen` has sent at least one event
    waited_s: float = 0.0  # seconds that the request waited for a free slot
    at: float = msgspec.field(default_factory=time.time)

    def explanation(self) -> str:
        parts = [f"{self.model} was asked for; its policy is {self.policy}."]
        for failed in self.failed:
            parts.append(f"{failed.backend} was tried and failed: {failed.error}")
        if self.waited_s > 0:
            parts.append(f"It waited {self.waited_s:.3f} s for a free place.")
        if self.chosen is None:
            parts.append(f"Nobody was chosen: {self.why}.")
        else:
            parts.append(f"{self.chosen} was chosen: {self.why}.")
        for each in self.candidates:
            if each.why_not is not None:
                parts.append(f"Not {each.name}: {each.why_not}.")
        return " ".join(parts)

    def body(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class DecisionLog:
    """The newest `MAX_DECISIONS` decisions. They can be found by the id of the backend request or
    of the HTTP request.
    """

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Decision] = OrderedDict()
        self._by_http_id: dict[str, deque[Decision]] = {}

    def add(self, decision: Decision) -> None:
        self._by_id[decision.request_id] = decision
        if decision.http_request_id:
            self._by_http_id.setdefault(decision.http_request_id, deque()).append(decision)
        while len(self._by_id) > MAX_DECISIONS:
            _, oldest = self._by_id.popitem(last=False)
            same = self._by_http_id.get(oldest.http_request_id)
            if same:
                same.popleft()
                if not same:
                    del self._by_http_id[oldest.http_request_id]

    def find(self, request_id: str) -> list[Decision]:
        """All decisions about a request: one for each of its prompts."""
        exact = self._by_id.get(request_id)
        if exact is not None:
            return [exact]
        by_http = self._by_http_id.get(request_id)
        if by_http is not None:
            return list(by_http)
        found = []
        for number in range(MAX_PARTS):
            part = self._by_id.get(f"{request_id}-{number}")
            if part is None:
                break
            found.append(part)
        return found

    def newest(self, count: int) -> list[Decision]:
        return [
            self._by_id[key] for key, _ in zip(reversed(self._by_id), range(count), strict=False)
        ]
