"""What is remembered of one HTTP request, from its first byte to its log line."""

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Send

from engine.core.interfaces.backend import UsageEvent

_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class RequestRecord:
    """Filled in by whoever learns each fact; read once, when the answer has ended."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    num_body_bytes: int = 0  # of the request, as far as it has arrived whole
    status: int = 0
    error_code: str | None = None
    completion_id: str | None = None  # what the backend knows the request as
    backends: tuple[str, ...] = ()  # who answered, where there are several who could
    user_hash: str | None = None
    ttft_s: float | None = None
    usage: UsageEvent | None = None  # of an answer that was finished
    warnings: list[str] = field(default_factory=list)  # for the X-Engine-Warnings header
    metadata: dict[str, str] | None = None  # what the client attached
    limit_headers: dict[str, str] = field(default_factory=dict)  # what its key has left
    send: Send | None = None  # the HTTP server's own, for what no layer has to see

    def work_fields(self) -> dict[str, Any]:
        """What the log says of the generation, as far as it is known."""
        fields: dict[str, Any] = {
            "completion_id": self.completion_id,
            "backend": ", ".join(self.backends) or None,
            "user_hash": self.user_hash,
            "metadata": self.metadata,
            "warnings": self.warnings or None,
        }
        if self.ttft_s is not None:
            fields["ttft_s"] = round(self.ttft_s, 6)
        if self.usage is not None:
            fields |= {
                "prompt_tokens": self.usage.prompt_tokens,
                "cached_tokens": self.usage.cached_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "queue_s": round(self.usage.queue_s, 6),
                "prefill_s": round(self.usage.prefill_s, 6),
                "decode_s": round(self.usage.decode_s, 6),
            }
        return {name: value for name, value in fields.items() if value is not None}


def new_request_id(supplied: str | None) -> str:
    """The client's own id where it is harmless in a log and a header, else a fresh one."""
    if supplied is not None and _SAFE_ID.fullmatch(supplied):
        return supplied
    return f"req-{secrets.token_hex(16)}"


def record_of(scope: Mapping[str, Any]) -> RequestRecord:
    record = scope["state"]["record"]
    assert isinstance(record, RequestRecord)
    return record
