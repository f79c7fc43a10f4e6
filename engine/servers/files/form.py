"""Parses the multipart form of an upload, which has a few small fields and one file.

The upload time and the sizes of the body, the file, the headers and the fields are limited. The
limits are checked while the form is read. The bytes of the file are passed on as they arrive, so
the whole file is never in memory.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from engine.core.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
)
from engine.servers.http.errors import ClientDisconnectedError

MAX_FILE_BYTES = 200 * 2**20
UPLOAD_TIMEOUT_S = 600.0
IDLE_TIMEOUT_S = 30.0

# Max bytes of the form besides the file: fields, part headers and boundaries.
_OVERHEAD_BYTES = 65_536
_MAX_HEADERS = 8
_MAX_HEADER_BYTES = 4_096
_MAX_FIELD_BYTES = 1_024
FILE = "file"
FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


class UploadForm:
    """The fields of an upload form and the name of its file. Callbacks of the multipart parser set
    them. `file_part` is the name of the part that has the file.
    """

    def __init__(self, file_part: str, known: frozenset[str], max_bytes: int) -> None:
        self._file_part = file_part
        self._known = known
        self._max_bytes = max_bytes
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None  # as the client wrote it; None if there is no file
        self.is_complete = False
        self._file_bytes: list[bytes] = []
        self._num_file_bytes = 0
        self._part = ""
        self._value = bytearray()
        self._header = bytearray()
        self._header_value = bytearray()
        self._disposition = b""

    def parser(self, boundary: bytes) -> MultipartParser:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_to_header,
                "on_header_value": self._add_to_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._name_part,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
            max_header_count=_MAX_HEADERS,
            max_header_size=_MAX_HEADER_BYTES,
        )

    def take_file_bytes(self) -> bytes:
        """The bytes of the file that have arrived since the last call."""
        taken, self._file_bytes = b"".join(self._file_bytes), []
        return taken

    def _begin_part(self) -> None:
        self._part = ""
        self._disposition = b""
        self._value = bytearray()

    def _add_to_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_to_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header, self._header_value = bytearray(), bytearray()

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        part = options.get(b"name", b"").decode("utf-8", "replace")
        if part != self._file_part and part not in self._known:
            known = ", ".join(sorted({self._file_part, *self._known}))
            raise InvalidRequestError(
                f"The form has an unknown part. It may have: {known}.",
                param=part[:64] or "body",
                code="unknown_parameter",
            )
        is_file = part == self._file_part
        if part in self.fields or (is_file and self.file_name is not None):
            raise InvalidRequestError(f"{part} was sent twice.", param=part)
        if is_file:
            self.file_name = options.get(b"filename", b"").decode("utf-8", "replace")
        self._part = part

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == self._file_part:
            self._num_file_bytes += end - start
            if self._num_file_bytes > self._max_bytes:
                raise _too_large(self._file_part, self._max_bytes)
            self._file_bytes.append(data[start:end])
            return
        if len(self._value) + end - start > _MAX_FIELD_BYTES:
            raise InvalidRequestError(
                f"{self._part}: should have at most {_MAX_FIELD_BYTES} bytes.", param=self._part
            )
        self._value += data[start:end]

    def _end_part(self) -> None:
        if self._part != self._file_part:
            self.fields[self._part] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.is_complete = True


async def read_form(
    request: Request,
    write: Callable[[bytes], Awaitable[None]],
    file_part: str = FILE,
    known: frozenset[str] = FIELDS,
    max_bytes: int | None = None,
) -> UploadForm:
    """Read the form and pass the file's bytes to `write` as they arrive. Raises an `EngineError` if
    the form is invalid, too large or too slow.
    """
    max_bytes = max_bytes or MAX_FILE_BYTES
    form = UploadForm(file_part, known, max_bytes)
    try:
        parser = form.parser(_boundary(request))
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            async for chunk in _chunks(request, file_part, max_bytes):
                parser.write(chunk)
                if data := form.take_file_bytes():
                    await write(data)
            parser.finalize()
    except FormParserError:
        raise InvalidRequestError("The body is not a valid multipart form.") from None
    except TimeoutError:
        raise RequestTimeoutError("The upload did not arrive in time.") from None
    except ClientDisconnect:
        raise ClientDisconnectedError("The client left while sending its file.") from None
    if not form.is_complete:
        raise InvalidRequestError("The multipart form ends before its last boundary.")
    return form


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind.lower() != b"multipart/form-data" or not options.get(b"boundary"):
        raise UnsupportedMediaTypeError(
            "Content-Type must be multipart/form-data, with a boundary."
        )
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaTypeError(
            "Content-Encoding is not supported; send the body uncompressed."
        )
    return options[b"boundary"]


async def _chunks(request: Request, file_part: str, max_file: int) -> AsyncIterator[bytes]:
    announced = request.headers.get("content-length", "")
    max_bytes = max_file + _OVERHEAD_BYTES
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise _too_large(file_part, max_file)
    num_bytes = 0
    stream = request.stream()
    while True:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            chunk = await anext(stream, None)
        if chunk is None:
            return
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(file_part, max_file)
        yield chunk


def _too_large(file_part: str, max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"{file_part} may have at most {max_bytes // 2**20} MiB; split it.", param=file_part
    )
