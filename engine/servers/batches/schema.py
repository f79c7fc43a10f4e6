"""The request bodies of /v1/batches, and the batch as stored and as sent to clients."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from engine.servers.files.expiry import ExpiresAfter
from engine.servers.http.listing import Cursor, Query

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
MESSAGES = "/v1/messages"  # the endpoint of batches of Anthropic's API
WINDOW_S = 86_400  # seconds of "24h", the only accepted completion_window
ENDED = ("completed", "failed", "expired", "cancelled")


class BatchBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


class BatchQuery(Query):
    after: Cursor | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """An error that makes a whole batch fail. `line` is the number of the faulty input line, from
    1. It is None if the error is not about one line.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch. The columns of its database table have the same names as these fields. Times are in
    seconds since 1970.
    """

    id: str
    owner: str
    key: str  # name of the API key that made the batch, and whose limits its lines have
    pool: str  # id of the servers that can run the batch (see `runner.py`)
    endpoint: str
    input_file_id: str
    results_id: str  # id of the reserved file, later of the output file
    output_life_s: int
    metadata: str | None  # JSON text
    model: str | None
    status: str
    errors: str | None  # JSON text
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    num_lines: int
    num_completed: int
    num_failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def ending(self, num_unfinished: int) -> str:
        """The final status that the batch has if it ends now, with `num_unfinished` lines not
        answered.
        """
        if self.errors is not None:
            return "failed"
        if self.status == "cancelling":
            return "cancelled"
        return "expired" if num_unfinished or self.model is None else "completed"

    def body(self) -> dict[str, Any]:
        """The batch object of OpenAI's API."""
        errors = None if self.errors is None else msgspec.json.decode(self.errors)
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": None if errors is None else {"object": "list", "data": errors},
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {
                "total": self.num_lines,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": None if self.metadata is None else msgspec.json.decode(self.metadata),
        }


@dataclass(frozen=True, slots=True)
class NewBatch:
    id: str
    owner: str
    key: str
    pool: str
    endpoint: str
    input_file_id: str
    results_id: str
    output_life_s: int
    metadata: str | None
    created_at: int
    expires_at: int


@dataclass(frozen=True, slots=True)
class LineUsage:
    """Token usage in the answer to one line."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """The result of a line when its batch ends. `result` is None if the line was not answered."""

    number: int
    custom_id: str
    succeeded: bool
    result: bytes | None
