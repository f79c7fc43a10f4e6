"""What a backend tells the server about an HTTP request: how it went and, if requests are recorded,
all that is needed to run it again.
"""

from dataclasses import dataclass, field

import msgspec

from engine.core.interfaces.request import GenerateRequest
from engine.core.interfaces.timeline import Preparation, Timeline

# Max timelines, preparations and recorded requests that are kept of one HTTP request.
MAX_PARTS = 64


class RecordedRequest(msgspec.Struct):
    """A request as the engine got it, with the tokens that it generated."""

    request: GenerateRequest  # has a seed
    fingerprint: str  # of the model and of how it is computed
    token_ids: dict[int, list[int]] = {}  # of each choice


@dataclass(slots=True)
class RequestNotes:
    """Collects what a backend tells about one HTTP request, which may have several prompts."""

    preparations: list[Preparation] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    # One entry for each prompt. None: requests are not recorded
    recorded: list[RecordedRequest] | None = None

    def add_timeline(self, timeline: Timeline) -> None:
        if len(self.timelines) < MAX_PARTS:
            self.timelines.append(timeline)

    def add_preparation(self, preparation: Preparation) -> None:
        if len(self.preparations) < MAX_PARTS:
            self.preparations.append(preparation)

    def record(self, request: GenerateRequest, fingerprint: str) -> RecordedRequest | None:
        """Begin to record a request. None if requests are not recorded."""
        if self.recorded is None or len(self.recorded) >= MAX_PARTS:
            return None
        made = RecordedRequest(request, fingerprint)
        self.recorded.append(made)
        return made
