"""A batch's results as JSONL: a line for each request, in OpenAI's shape, in the input's order."""

import secrets
from typing import Any

import msgspec

from engine.servers.batches.caller import Answer
from engine.servers.batches.schema import Batch
from engine.servers.batches.store import BatchStore, Outcome, Usage
from engine.servers.files.draft import Draft
from engine.servers.files.expiry import unix_now
from engine.servers.files.store import FileStore, StoredFile, new_file_id

_encode = msgspec.json.encode

# What is said of lines that were never answered, by how their batch ends.
_UNANSWERED = {
    "expired": ("batch_expired", "The batch expired before this request was answered."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was answered."),
    "failed": ("batch_failed", "The batch failed before this request was answered."),
}


def answered_line(custom_id: str, answer: Answer) -> tuple[bytes, Usage]:
    """The line of an answer, whatever its status, and what the answer cost."""
    body = msgspec.json.decode(answer.body)
    response = {
        "status_code": answer.status,
        "request_id": answer.headers["x-request-id"],
        "body": body,
    }
    return _line(custom_id, response, None), _usage(body)


async def compose(store: BatchStore, files: FileStore, batch: Batch, num_unfinished: int) -> None:
    """End the batch: its lines become an output file, an error file, or both. Can be repeated."""
    status = batch.ending(num_unfinished)
    output_path, error_id = files.path_of(batch.results_id), new_file_id()
    async with Draft(output_path) as output, Draft(files.path_of(error_id)) as errors:
        after = 0
        while page := await store.outcomes(batch.id, after):
            for outcome in page:
                target = output if outcome.succeeded else errors
                await target.write(_outcome_line(outcome, status) + b"\n")
            after = page[-1].number
        output_file = await _publish(output, batch, batch.results_id, "output")
        error_file = await _publish(errors, batch, error_id, "error")
        await store.end(batch, status, output_file, error_file)
        for draft, file in ((output, output_file), (errors, error_file)):
            if file is not None:
                draft.keep()


async def _publish(draft: Draft, batch: Batch, file_id: str, kind: str) -> StoredFile | None:
    """None for no lines: then there is no file."""
    if draft.num_bytes == 0:
        return None
    await draft.publish()
    now = unix_now()
    return StoredFile(
        file_id,
        batch.owner,
        "batch_output",
        f"{batch.id}_{kind}.jsonl",
        draft.num_bytes,
        now,
        now + batch.output_life_s,
    )


def _outcome_line(outcome: Outcome, status: str) -> bytes:
    if outcome.result is not None:
        return outcome.result
    code, message = _UNANSWERED[status]
    return _line(outcome.custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    return _encode(
        {
            "id": f"batch_req_{secrets.token_hex(16)}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0
    reasoning_tokens: int | None = 0


class _Counts(msgspec.Struct):
    """The usage object of every endpoint: chat and completions say prompt, responses say input."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


def _usage(body: dict[str, Any]) -> Usage:
    counts = msgspec.convert(body.get("usage") or {}, _Counts)
    read = counts.prompt_tokens_details or counts.input_tokens_details or _Details()
    written = counts.completion_tokens_details or counts.output_tokens_details or _Details()
    return Usage(
        input_tokens=counts.prompt_tokens or counts.input_tokens,
        cached_tokens=read.cached_tokens or 0,
        output_tokens=counts.completion_tokens or counts.output_tokens,
        reasoning_tokens=written.reasoning_tokens or 0,
    )
