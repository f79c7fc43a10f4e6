"""What is remembered of one HTTP request, from its first byte to its log line."""

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.core.interfaces.backend import UsageEvent

_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class RequestRecord:
    """Filled in by whoever learns each fact; read once, when the answer has ended."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    error_code: str | None = None
    completion_id: str | None = None  # what the backend knows the request as
    user_hash: str | None = None
    usage: UsageEvent | None = None


def new_request_id(supplied: str | None) -> str:
    """The client's own id where it is harmless in a log and a header, else a fresh one."""
    if supplied is not None and _SAFE_ID.fullmatch(supplied):
        return supplied
    return f"req-{secrets.token_hex(16)}"


def record_of(scope: Mapping[str, Any]) -> RequestRecord:
    record = scope["state"]["record"]
    assert isinstance(record, RequestRecord)
    return record
