"""ModelStreamInfer: many requests on one gRPC stream, of which only a few are held at once."""

import asyncio
import logging
from typing import Any

from engine.core.errors import EngineError, RequestTimeoutError
from engine.core.text.long_texts import after_other_long_texts
from engine.servers.http.errors import opaque_error, short_message
from engine.servers.http.limits import INLINE_BYTES
from engine.servers.kserve import grpc_convert as convert
from engine.servers.kserve.grpc_call import MAX_WAITING, Call, CallFailed, decoded_message, shown

logger = logging.getLogger(__name__)

# Requests of one stream that are open at once. Later ones are not read until one of them ends.
MAX_OPEN = 64
IDLE_S = 600.0  # a stream without a request for this long is ended
MAX_ID_LENGTH = 256


class Stream:
    """Answers the requests of one stream. Their responses are sent as they come, so those of
    several requests are mixed; each has the id of its request. At most `MAX_OPEN` requests are
    open, and messages are read while those of open requests have less than `max_bytes`.
    """

    def __init__(self, asked: Call, context: Any, max_bytes: int) -> None:
        self._asked = asked
        self._context = context
        self._max_bytes = max_bytes
        self._responses: asyncio.Queue[Any] = asyncio.Queue(MAX_WAITING)
        self._num_open = self._num_bytes = 0
        self._ended = asyncio.Event()  # a request has ended since this was cleared

    async def run(self) -> None:
        writing = asyncio.create_task(self._write_all())
        answering: set[asyncio.Task[None]] = set()
        try:
            while (raw := await self._next()) is not None:
                self._num_open += 1
                self._num_bytes += len(raw)
                task = asyncio.create_task(self._answer(raw))
                answering.add(task)
                task.add_done_callback(answering.discard)
            await asyncio.gather(*answering)
            await self._responses.put(None)
            await writing
        finally:
            for task in (*answering, writing):
                task.cancel()
            await asyncio.gather(*answering, writing, return_exceptions=True)

    async def _write_all(self) -> None:
        while (response := await self._responses.get()) is not None:
            await self._context.write(response)

    async def _next(self) -> bytes | None:
        while self._num_open >= MAX_OPEN or self._num_bytes >= self._max_bytes:
            self._ended.clear()
            await self._ended.wait()
        reading = asyncio.ensure_future(self._asked.read())
        try:
            while True:
                done, _ = await asyncio.wait([reading], timeout=IDLE_S)
                if done:
                    return reading.result()
                if not self._num_open:
                    raise RequestTimeoutError(
                        f"The stream had no request for {IDLE_S:.0f} seconds; open another."
                    )
        finally:
            reading.cancel()

    async def _answer(self, raw: bytes) -> None:
        request_id = ""
        try:
            request = await decoded_message("ModelInferRequest", raw)
            if len(request.id) <= MAX_ID_LENGTH:  # a longer one is refused, and not sent back
                request_id = request.id
            await self._infer(request, is_long=len(raw) > INLINE_BYTES)
        except CallFailed as failed:
            await self._fail(failed.message, request_id)
        except EngineError as error:
            await self._fail(short_message(error), request_id)
        except Exception:
            logger.exception("A gRPC stream could not be answered.")
            await self._fail(opaque_error().message, request_id)
        finally:
            self._num_open -= 1
            self._num_bytes -= len(raw)
            self._ended.set()

    async def _infer(self, request: Any, *, is_long: bool) -> None:
        def convert_all() -> tuple[dict[str, Any], dict[str, Any] | None]:
            body = convert.to_json(request)
            return body, convert.streamed_words(body)

        body, words = await after_other_long_texts(convert_all) if is_long else convert_all()
        if words is None:
            made = await self._asked.post(convert.path_of(request, "infer"), body)
            await self._responses.put(convert.stream_response(made, is_final=True))
            return
        async for event in self._asked.stream(convert.path_of(request, "generate_stream"), words):
            whole = convert.from_event(event, request.id)
            await self._responses.put(convert.stream_response(whole, is_final=False))
        if convert.wants_empty_end(body):
            await self._responses.put(convert.empty_end(request))

    async def _fail(self, message: str, request_id: str) -> None:
        await self._responses.put(convert.stream_error(shown(message), request_id))
