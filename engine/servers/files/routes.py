"""/v1/files: input and result files of batches. Only the tenant who stored a file can see it.

Of OpenAI's purposes, `batch` and `fine-tune` are supported. Others are refused.
"""

import asyncio
import math
import unicodedata
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.core.errors import InvalidRequestError
from engine.servers.access.auth import principal_of
from engine.servers.files.expiry import ExpiresAfter, unix_now
from engine.servers.files.form import UploadForm, read_form
from engine.servers.files.store import FileStore
from engine.servers.http.errors import invalid_request
from engine.servers.http.listing import Cursor, Order, Query, list_body, parse_query
from engine.servers.http.request_log import record_of
from engine.servers.serving.services import Services, json_response

MAX_NAME_LENGTH = 255
_UNNAMED = "upload.jsonl"


def safe_name(given: str) -> str:
    """A file name that is safe to store: the last part of the client's path, without control
    characters and bidirectional marks.
    """
    last = given.replace("\\", "/").rsplit("/", 1)[-1]
    kept = "".join(
        each for each in last if unicodedata.category(each)[0] not in "CZ" or each == " "
    )
    name = kept.strip(" .")[:MAX_NAME_LENGTH]
    return name or _UNNAMED


def content_disposition(name: str) -> str:
    """The value of a `Content-Disposition` header that makes a browser save the file as `name` and
    never display it.
    """
    plain = "".join(each if each.isalnum() or each in "._- " else "_" for each in name)
    ascii_name = plain.encode("ascii", "replace").decode().replace("?", "_")
    return f"attachment; filename=\"{ascii_name}\"; filename*=UTF-8''{quote(name, safe='')}"


# A client that reads nothing for this many seconds is disconnected.
STALL_S = 60.0
_CHUNK_BYTES = 1 << 18


Purpose = Literal["batch", "fine-tune"]


class UploadFields(BaseModel):
    """The upload's fields besides the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class FileQuery(Query):
    after: Cursor | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Order = "desc"
    purpose: Annotated[str, Field(max_length=64)] | None = None


def add_files_routes(app: FastAPI, services: Services, files: FileStore) -> None:
    @app.post("/v1/files")
    async def upload_file(request: Request) -> Response:
        owner = principal_of(request).name
        async with files.upload(owner) as upload:
            form = await read_form(request, upload.write)
            fields = _fields(form)
            if form.file_name is None or upload.num_bytes == 0:
                raise InvalidRequestError("The form has no file, or an empty one.", param="file")
            life_s = bounded_life_s(request, services, "expires_after", fields.expires_after)
            name = safe_name(form.file_name)
            file = await upload.keep(fields.purpose, name, unix_now() + life_s)
        return json_response(file.body())

    @app.get("/v1/files")
    async def list_files(request: Request) -> Response:
        query = parse_query(FileQuery, request)
        found = await files.page(
            principal_of(request).name, query.purpose, query.after, query.order, query.limit + 1
        )
        return json_response(list_body([file.body() for file in found], query.limit))

    @app.get("/v1/files/{file_id}")
    async def retrieve_file(request: Request, file_id: str) -> Response:
        file = await files.find(principal_of(request).name, file_id)
        return json_response(file.body())

    @app.get("/v1/files/{file_id}/content", response_class=FileContent, status_code=200)
    async def file_content(request: Request, file_id: str) -> Response:
        file, content = await files.open(principal_of(request).name, file_id)
        return FileContent(content, file.num_bytes, file.filename)

    @app.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        await files.delete(principal_of(request).name, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


class FileContent(Response):
    """A response that sends a file in chunks, which are read in a thread. Closes the file at the
    end.
    """

    media_type = "application/octet-stream"

    def __init__(self, content: BinaryIO, num_bytes: int, name: str) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "content-length": str(num_bytes),
                "content-disposition": content_disposition(name),
                "x-content-type-options": "nosniff",
            }
        )
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            while True:
                data = await asyncio.to_thread(self._content.read, _CHUNK_BYTES)
                async with asyncio.timeout(STALL_S):
                    more = bool(data)
                    await send({"type": "http.response.body", "body": data, "more_body": more})
                if not more:
                    return
        except TimeoutError:
            # The final chunk is not sent, so the HTTP server closes the connection.
            record_of(scope).error_code = "CLIENT_STALLED"
        finally:
            self._content.close()


def _fields(form: UploadForm) -> UploadFields:
    given: dict[str, Any] = {}
    for name, value in form.fields.items():
        outer, _, inner = name.partition("[")
        if inner:
            # Form values are text. So a value of digits is converted to a number.
            is_number = inner == "seconds]" and value.isdecimal()
            given.setdefault(outer, {})[inner.removesuffix("]")] = (
                int(value) if is_number else value
            )
        else:
            given[outer] = value
    try:
        return UploadFields.model_validate(given)
    except ValidationError as error:
        raise invalid_request(error) from None


def bounded_life_s(
    request: Request, services: Services, param: str, wanted: ExpiresAfter | None
) -> int:
    """How many seconds a file is kept: the requested time, up to the server's limit. Warns the
    client if the time was lowered.
    """
    longest = math.ceil(services.settings.storage.file_ttl_s)
    if wanted is None:
        return longest
    if wanted.seconds > longest:
        services.warn(request, param, f"lowered to {longest} seconds, this server's storage limit")
    return min(wanted.seconds, longest)
