"""/v1/uploads: a file that arrives in parts, which become one file of /v1/files.

A part is a hidden file of the store, so it counts towards the storage limit and expires. When the
client completes the upload, its parts are copied to the final file and deleted.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import ConflictError, InvalidRequestError
from engine.servers.access.auth import principal_of
from engine.servers.files.draft import storage_errors
from engine.servers.files.expiry import ExpiresAfter, unix_now
from engine.servers.files.form import MAX_FILE_BYTES, read_form
from engine.servers.files.routes import Purpose, bounded_life_s, safe_name
from engine.servers.files.store import FILES, PART, FileStore, StoredFile, Upload
from engine.servers.http.errors import problem
from engine.servers.http.limits import read_parsed
from engine.servers.schema.body import validated
from engine.servers.serving.services import Services, json_response
from engine.servers.storage.tables import Db, Store, Table, transaction

LIFE_S = 3_600
# How long an upload that has ended is still known, in seconds after its expiry.
KNOWN_S = 86_400
# Of each tenant
MAX_OPEN_UPLOADS = 100
MAX_KEPT_UPLOADS = 1_000
MAX_PARTS = 1_000
MAX_PART_BYTES = 64 * 2**20
MAX_BODY_BYTES = 65_536
RETRY_FULL_S = 60.0
_COPY_BYTES = 1 << 20

SCHEMA = """
CREATE TABLE IF NOT EXISTS uploads (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    file_life_s INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    status TEXT NOT NULL
);
"""
_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


class UploadBody(BaseModel):
    model_config = _STRICT

    filename: Annotated[str, Field(min_length=1, max_length=255)]
    purpose: Purpose
    bytes: Annotated[int, Field(ge=1, le=MAX_FILE_BYTES)]
    # The MIME type is required by OpenAI. It is not stored, because batches read all files alike.
    mime_type: Annotated[str, Field(max_length=255)]
    expires_after: ExpiresAfter | None = None


class PartFields(BaseModel):
    """The form of a part has no field besides the part's bytes, `data`."""

    model_config = _STRICT


class CompleteBody(BaseModel):
    model_config = _STRICT

    part_ids: Annotated[
        list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=MAX_PARTS)
    ]
    md5: Annotated[str, Field(pattern="^[0-9a-fA-F]{32}$")] | None = None


@dataclass(frozen=True, slots=True)
class PartedUpload:
    """An upload in parts. The columns of its database table have the same names as these fields."""

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    file_life_s: int
    created_at: int
    expires_at: int
    status: str = "pending"

    def body(self, file: StoredFile | None = None) -> dict[str, Any]:
        """The upload object of OpenAI's API."""
        return {
            "id": self.id,
            "object": "upload",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": self.status,
            "file": None if file is None else file.body(),
        }


UPLOADS = Table(
    "uploads",
    PartedUpload,
    noun="upload",
    param="upload_id",
    code="upload_not_found",
    is_open="status = 'pending' AND expires_at > ?",
)


class UploadStore(Store):
    def __init__(self, files: FileStore) -> None:
        super().__init__(files.database)
        self._files = files

    @transaction
    def create(self, db: Db, new: PartedUpload) -> None:
        now = unix_now()
        UPLOADS.delete(db, "expires_at <= ?", (now - KNOWN_S,))
        words = "uploads are not complete"
        UPLOADS.check_open(db, new.owner, MAX_OPEN_UPLOADS, words, RETRY_FULL_S, (now,))
        UPLOADS.drop_oldest(db, new.owner, MAX_KEPT_UPLOADS, (now,))
        UPLOADS.insert(db, new)

    @transaction
    def pending(self, db: Db, upload_id: str, owner: str) -> PartedUpload:
        return _pending(db, upload_id, owner)

    async def keep_part(self, part: Upload, upload: PartedUpload) -> StoredFile:
        def check(db: Db, file: StoredFile) -> None:
            _pending(db, upload.id, upload.owner)
            if len(_parts(db, upload.id)) > MAX_PARTS:
                raise InvalidRequestError(
                    f"An upload may have at most {MAX_PARTS} parts; send larger ones.", param="data"
                )

        return await part.keep(PART, upload.id, upload.expires_at, check, is_ready=False)

    async def complete(
        self, upload: PartedUpload, part_ids: Sequence[str], md5: str | None
    ) -> tuple[PartedUpload, StoredFile]:
        """Copy the parts to a file. If something is wrong with them, the upload stays pending."""
        parts = await self.database.run(lambda db: _parts(db, upload.id))
        if not set(part_ids) <= parts.keys() or len(set(part_ids)) < len(part_ids):
            raise problem("part_ids", "should be different parts of this upload")
        num_bytes = sum(parts[each] for each in part_ids)
        if num_bytes != upload.num_bytes:
            rule = f"have {num_bytes} bytes in all; the upload was created for {upload.num_bytes}"
            raise problem("part_ids", rule)
        ended: list[str] = []
        async with self._files.upload(upload.owner, num_freed=num_bytes) as made:
            digest = hashlib.md5(usedforsecurity=False)
            for each in part_ids:
                await self._copy(each, made, digest)
            if md5 is not None and md5.lower() != digest.hexdigest():
                raise problem("md5", f"should be {digest.hexdigest()}, as that of the parts")

            def finish(db: Db, file: StoredFile) -> None:
                ended.extend(_end(db, upload, "completed"))

            expires_at = unix_now() + upload.file_life_s
            file = await made.keep(upload.purpose, upload.filename, expires_at, finish)
        await self._files.remove(ended)
        return replace(upload, status="completed"), file

    async def cancel(self, upload: PartedUpload) -> PartedUpload:
        await self._files.remove(await self.database.run(lambda db: _end(db, upload, "cancelled")))
        return replace(upload, status="cancelled")

    async def _copy(self, part_id: str, made: Upload, digest: Any) -> None:
        path = self._files.path_of(part_id)
        with storage_errors(), await asyncio.to_thread(open, path, "rb") as part:
            while data := await asyncio.to_thread(part.read, _COPY_BYTES):
                digest.update(data)
                await made.write(data)


def _pending(db: Db, upload_id: str, owner: str) -> PartedUpload:
    upload = UPLOADS.find(db, upload_id, owner)
    status = upload.status
    if status == "pending" and upload.expires_at <= unix_now():
        status = "expired"
    if status != "pending":
        raise ConflictError(f"This upload is {status}. Create a new one.", param="upload_id")
    return upload


def _parts(db: Db, upload_id: str) -> dict[str, int]:
    """Maps the id of each part to its size. A part has its upload's id as file name."""
    rows = db.execute(
        "SELECT id, num_bytes FROM files WHERE purpose = ? AND filename = ?", (PART, upload_id)
    )
    return {row["id"]: row["num_bytes"] for row in rows}


def _end(db: Db, upload: PartedUpload, status: str) -> list[str]:
    """End a pending upload and delete its parts. Returns their ids."""
    _pending(db, upload.id, upload.owner)
    UPLOADS.update(db, upload.id, status=status)
    return FILES.delete(db, "purpose = ? AND filename = ?", (PART, upload.id))


def add_uploads_routes(app: FastAPI, services: Services, files: FileStore) -> None:
    store = UploadStore(files)

    @app.post("/v1/uploads")
    async def create_upload(request: Request) -> Response:
        body = await read_parsed(request, MAX_BODY_BYTES, partial(validated, UploadBody))
        life_s = bounded_life_s(request, services, "expires_after", body.expires_after)
        now = unix_now()
        upload = PartedUpload(
            f"upload_{secrets.token_hex(16)}",
            principal_of(request).name,
            safe_name(body.filename),
            body.purpose,
            body.bytes,
            life_s,
            now,
            now + LIFE_S,
        )
        await store.create(upload)
        return json_response(upload.body())

    @app.post("/v1/uploads/{upload_id}/parts")
    async def add_part(request: Request, upload_id: str) -> Response:
        upload = await store.pending(upload_id, principal_of(request).name)
        async with files.upload(upload.owner, f"part_{secrets.token_hex(16)}") as part:
            await read_form(request, part.write, "data", frozenset(), MAX_PART_BYTES)
            if part.num_bytes == 0:
                raise InvalidRequestError("The form has no data, or an empty one.", param="data")
            file = await store.keep_part(part, upload)
        return json_response(
            {
                "id": file.id,
                "object": "upload.part",
                "created_at": file.created_at,
                "upload_id": upload.id,
            }
        )

    @app.post("/v1/uploads/{upload_id}/complete")
    async def complete_upload(request: Request, upload_id: str) -> Response:
        body = await read_parsed(request, MAX_BODY_BYTES, partial(validated, CompleteBody))
        pending = await store.pending(upload_id, principal_of(request).name)
        upload, file = await store.complete(pending, body.part_ids, body.md5)
        return json_response(upload.body(file))

    @app.post("/v1/uploads/{upload_id}/cancel")
    async def cancel_upload(request: Request, upload_id: str) -> Response:
        pending = await store.pending(upload_id, principal_of(request).name)
        return json_response((await store.cancel(pending)).body())
