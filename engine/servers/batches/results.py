"""Formats the results of a batch and writes its result files.

A batch of OpenAI's API has an output file, and an error file for lines that failed. A batch of
Anthropic's messages has one file for all results.
"""

import secrets
from typing import Any

import msgspec

from engine.servers.batches.caller import LineAnswer
from engine.servers.batches.schema import MESSAGES, Batch, LineOutcome, LineUsage
from engine.servers.batches.store import BatchStore
from engine.servers.files.draft import Draft
from engine.servers.files.expiry import unix_now
from engine.servers.files.store import FileStore, StoredFile, new_file_id

_encode = msgspec.json.encode

# Maps the final status of a batch to the error code and message of its lines that were not
# answered.
_UNANSWERED = {
    "expired": ("batch_expired", "The batch expired before this request was answered."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was answered."),
    "failed": ("batch_failed", "The batch failed before this request was answered."),
}


def answered_line(endpoint: str, custom_id: str, answer: LineAnswer) -> tuple[bytes, LineUsage]:
    """Format the answer to a line as a line of the result file. Also returns the answer's token
    usage.
    """
    body = msgspec.json.decode(answer.body)
    if endpoint == MESSAGES:
        kind, name = ("succeeded", "message") if answer.status == 200 else ("errored", "error")
        return _message_line(custom_id, {"type": kind, name: body}), _usage(body)
    response = {
        "status_code": answer.status,
        "request_id": answer.headers["x-request-id"],
        "body": body,
    }
    return _line(custom_id, response, None), _usage(body)


async def compose(store: BatchStore, files: FileStore, batch: Batch, num_unfinished: int) -> None:
    """End the batch: write the results of its lines to an output file, an error file, or both.
    `num_unfinished` is the number of lines without a result. Idempotent.
    """
    status = batch.ending(num_unfinished)
    output_path, error_id = files.path_of(batch.results_id), new_file_id()
    async with Draft(output_path) as output, Draft(files.path_of(error_id)) as errors:
        after = 0
        while page := await store.outcomes(batch.id, after):
            for outcome in page:
                is_output = outcome.succeeded or batch.endpoint == MESSAGES
                target = output if is_output else errors
                await target.write(_outcome_line(batch.endpoint, outcome, status) + b"\n")
            after = page[-1].number
        output_file = await _publish(output, batch, batch.results_id, "output")
        error_file = await _publish(errors, batch, error_id, "error")
        await store.end(batch, status, output_file, error_file)
        for draft, file in ((output, output_file), (errors, error_file)):
            if file is not None:
                draft.keep()


async def _publish(draft: Draft, batch: Batch, file_id: str, kind: str) -> StoredFile | None:
    """Publish a result file under its final name. Returns None if the file has no lines."""
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


def _outcome_line(endpoint: str, outcome: LineOutcome, status: str) -> bytes:
    if outcome.result is not None:
        return outcome.result
    code, message = _UNANSWERED[status]
    if endpoint == MESSAGES:
        result: dict[str, Any] = {"type": "canceled" if status == "cancelled" else status}
        if status == "failed":
            error = {"type": "api_error", "message": message}
            result = {"type": "errored", "error": {"type": "error", "error": error}}
        return _message_line(outcome.custom_id, result)
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


def _message_line(custom_id: str, result: dict[str, Any]) -> bytes:
    """A result in the format of Anthropic's API."""
    return _encode({"custom_id": custom_id, "result": result})


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0
    reasoning_tokens: int | None = 0


class _Counts(msgspec.Struct):
    """The usage object of any endpoint. Chats and completions have `prompt_tokens`; the Responses
    API has `input_tokens`.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


def _usage(body: dict[str, Any]) -> LineUsage:
    counts = msgspec.convert(body.get("usage") or {}, _Counts)
    read = counts.prompt_tokens_details or counts.input_tokens_details or _Details()
    written = counts.completion_tokens_details or counts.output_tokens_details or _Details()
    return LineUsage(
        input_tokens=counts.prompt_tokens or counts.input_tokens,
        cached_tokens=read.cached_tokens or 0,
        output_tokens=counts.completion_tokens or counts.output_tokens,
        reasoning_tokens=written.reasoning_tokens or 0,
    )
