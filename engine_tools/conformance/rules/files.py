"""Rules for /v1/files and /v1/batches. They use files, and run a batch of one request."""

import asyncio
import json
from typing import Any

from engine_tools.conformance.expect import RuleFailed, expect, field, items, short, text
from engine_tools.conformance.rule import Group
from engine_tools.conformance.target import CHAT, Reply, Target

SDK = "openai-python"
_MISSING = (404, 405, 501)
_POLL_S = 0.2
_POLLS = 300


async def _upload(target: Target, content: bytes, name: str = "requests.jsonl") -> Reply:
    return await target.request(
        "POST",
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": (name, content, "application/jsonl")},
    )


async def _missing_files(target: Target) -> str | None:
    reply = await target.get("/v1/files")
    return f"no /v1/files (HTTP {reply.status})" if reply.status in _MISSING else None


async def _missing_batches(target: Target) -> str | None:
    reply = await target.get("/v1/batches")
    return f"no /v1/batches (HTTP {reply.status})" if reply.status in _MISSING else None


FILES = Group("files", _missing_files)
BATCHES = Group("batches", _missing_batches)


def _line(target: Target, custom_id: str) -> bytes:
    request = {"custom_id": custom_id, "method": "POST", "url": CHAT}
    return json.dumps(request | {"body": target.chat(max_tokens=2)}).encode() + b"\n"


async def _file(target: Target) -> Any:
    async def upload() -> Any:
        return (await _upload(target, _line(target, "one"))).ok()

    return await target.once("file", upload)


@FILES.rule(
    "FIL-01",
    "An uploaded file has id, object, bytes, filename and purpose",
    client=SDK,
    sees="None in fields that are declared as present",
)
async def upload(target: Target) -> None:
    found = await _file(target)
    text(found, "id")
    expect(field(found, "object") == "file", f"object is {short(found['object'])}")
    size = len(_line(target, "one"))
    expect(field(found, "bytes") == size, f"{short(found['bytes'])} bytes, not {size}")
    expect(field(found, "filename") == "requests.jsonl", short(found["filename"]))
    expect(field(found, "purpose") == "batch", f"purpose is {short(found['purpose'])}")


@FILES.rule("FIL-02", "A file's content is what was uploaded", client=SDK, sees="another content")
async def content(target: Target) -> None:
    reply = await target.get(f"/v1/files/{field(await _file(target), 'id')}/content")
    expect(reply.status == 200, reply.summary)
    expect(reply.content == _line(target, "one"), "the content is another")


@FILES.rule("FIL-03", "A file is listed and found", client=SDK, sees="a file that is lost")
async def listed(target: Target) -> None:
    id = field(await _file(target), "id")
    found = items((await target.get("/v1/files")).ok(), "data")
    expect(id in [field(each, "id") for each in found], "it is not in the list")
    again = (await target.get(f"/v1/files/{id}")).ok()
    expect(field(again, "id") == id, f"id is {short(again['id'])}")


@FILES.rule("FIL-04", "A deleted file is gone", client=SDK, sees="data that stays")
async def delete(target: Target) -> None:
    id = field((await _upload(target, _line(target, "gone"))).ok(), "id")
    expect(field((await target.delete(f"/v1/files/{id}")).ok(), "deleted") is True, "not deleted")
    reply = await target.get(f"/v1/files/{id}")
    expect(reply.status == 404, f"after deletion: {reply.summary}")


@FILES.rule("FIL-05", "An unknown file is 404", client=SDK, sees="a wrong exception")
async def unknown(target: Target) -> None:
    reply = await target.get("/v1/files/file-no-such-file")
    expect(reply.status == 404, f"answered with {reply.summary}")
    text(reply.error, "message")


@BATCHES.rule(
    "BAT-01",
    "A batch runs its requests and gives their answers under their ids",
    client=SDK,
    sees="a batch that never ends, or answers that can't be matched",
)
async def batch(target: Target) -> None:
    content = _line(target, "one") + _line(target, "two")
    id = field((await _upload(target, content)).ok(), "id")
    request = {"input_file_id": id, "endpoint": CHAT, "completion_window": "24h"}
    made = (await target.post("/v1/batches", request)).ok()
    expect(field(made, "object") == "batch", f"object is {short(made['object'])}")
    done = await _finished(target, text(made, "id"))
    expect(done["status"] == "completed", f"status is {short(done['status'])}")
    reply = await target.get(f"/v1/files/{text(done, 'output_file_id')}/content")
    lines = [json.loads(line) for line in reply.content.splitlines()]
    ids = sorted(field(line, "custom_id") for line in lines)
    expect(ids == ["one", "two"], f"answers of {ids}")
    field(lines[0], "response", "body", "choices", 0, "message")


async def _finished(target: Target, id: str) -> Any:
    for _ in range(_POLLS):
        found = (await target.get(f"/v1/batches/{id}")).ok()
        if field(found, "status") in ("completed", "failed", "expired", "cancelled"):
            return found
        await asyncio.sleep(_POLL_S)
    raise RuleFailed(f"still {found['status']} after {_POLL_S * _POLLS:.0f} s")


@BATCHES.rule(
    "BAT-02",
    "A batch of a file that is not there is refused",
    client=SDK,
    sees="a batch that never ends, or three failures",
)
async def no_file(target: Target) -> None:
    request = {"input_file_id": "file-none", "endpoint": CHAT, "completion_window": "24h"}
    reply = await target.post("/v1/batches", request)
    if reply.status != 404:
        reply.refused()


@BATCHES.rule("BAT-03", "An unknown batch is 404", client=SDK, sees="a wrong exception")
async def unknown_batch(target: Target) -> None:
    reply = await target.get("/v1/batches/batch_no_such_batch")
    expect(reply.status == 404, f"answered with {reply.summary}")
