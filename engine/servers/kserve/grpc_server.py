"""The Open Inference Protocol by gRPC, on `server.grpc_port`.

Each call becomes a request to the REST route of the same purpose, in the same process. So API keys,
limits, admission, metrics and the request log are those of HTTP. The key is in the call's metadata,
under the name of the HTTP header.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from engine.core.config_schema import ServerSettings
from engine.core.errors import ConfigError, EngineError
from engine.servers.http.errors import opaque_error, short_message
from engine.servers.http.in_process import Header, call, scope_of

try:
    import grpc
    import grpc.aio

    from engine.servers.kserve import grpc_convert as convert
    from engine.servers.kserve.grpc_messages import CLASSES, SERVICE, UNARY
except ImportError as missing:
    raise ConfigError(
        f"server.grpc_port needs the library {missing.name}: install engine[grpc], or remove the"
        " setting",
        param="server.grpc_port",
    ) from None

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
# Messages of one stream that wait for a slow client. Then its requests wait too.
MAX_WAITING = 64
# A message is larger than the prompt in it: it has names, shapes and parameters.
MESSAGE_MARGIN = 2**16
# Metadata that is passed on as HTTP headers.
PASSED_ON = frozenset({"authorization", "x-api-key", "api-key", "x-request-id", "x-session-id"})
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class CallFailed(Exception):
    """The application refused a request. `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class GrpcServer:
    """A background component of the server that answers gRPC calls on its event loop."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        if "kserve" not in settings.dialects:
            raise ConfigError(
                'server.grpc_port needs "kserve" in server.dialects', param="server.grpc_port"
            )
        self._app = app
        self._settings = settings
        self._server: Any = None
        self.port = 0  # the bound port, once the server has started

    async def start(self) -> None:
        host, port = self._settings.host, self._settings.grpc_port
        limit = self._settings.body_limit_mb * 2**20 + MESSAGE_MARGIN
        options = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.so_reuseport", 0),  # otherwise two servers may share a port without an error
        ]
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers([self._handlers()])
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {address}: another program is using it; choose another with"
                " server.grpc_port",
                param="server.grpc_port",
            ) from None
        await self._server.start()
        logger.info("gRPC at %s:%d", host, self.port)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(STOP_TIMEOUT_S)

    def _handlers(self) -> Any:
        answers: dict[str, Callable[[Any, _Call], Awaitable[Any]]] = {
            "ServerLive": _server_live,
            "ServerReady": _server_ready,
            "ModelReady": _model_ready,
            "ServerMetadata": _server_metadata,
            "ModelMetadata": _model_metadata,
            "ModelInfer": _model_infer,
            "RepositoryIndex": _repository_index,
        }
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                self._unary(answers[name]),
                CLASSES[f"{name}Request"].FromString,
                CLASSES[f"{name}Response"].SerializeToString,
            )
            for name in UNARY
        }
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream,
            CLASSES["ModelInferRequest"].FromString,
            CLASSES["ModelStreamInferResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _unary(self, answer: Callable[[Any, "_Call"], Awaitable[Any]]) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            try:
                with _Call(self._app, context) as asked:
                    return await answer(request, asked)
            except CallFailed as failed:
                code = CODES.get(failed.status, grpc.StatusCode.INTERNAL)
                await context.abort(code, failed.message)
            except EngineError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, short_message(error))

        return handle

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answer the requests of one stream. Their responses are sent as they come, so those of
        several requests are mixed; each has the id of its request.
        """
        responses: asyncio.Queue[Any] = asyncio.Queue(MAX_WAITING)
        with _Call(self._app, context) as asked:
            reading = asyncio.create_task(_answer_all(requests, asked, responses))
            try:
                while (response := await responses.get()) is not None:
                    yield response
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


async def _answer_all(
    requests: AsyncIterator[Any], asked: "_Call", responses: "asyncio.Queue[Any]"
) -> None:
    async with asyncio.TaskGroup() as group:
        async for request in requests:
            group.create_task(_answer_one(request, asked, responses))
    await responses.put(None)


async def _answer_one(request: Any, asked: "_Call", responses: "asyncio.Queue[Any]") -> None:
    try:
        body = convert.to_json(request)
        words = convert.streamed_words(body)
        if words is None:
            made = await asked.post(convert.path_of(request, "infer"), body)
            await responses.put(convert.stream_response(made, is_final=True))
            return
        wants_end = convert.wants_empty_end(body)
        async for event in asked.stream(convert.path_of(request, "generate_stream"), words):
            whole = convert.from_event(event, request.id)
            await responses.put(convert.stream_response(whole, is_final=False))
        if wants_end:
            await responses.put(convert.empty_end(request))
    except CallFailed as failed:
        await responses.put(convert.stream_error(failed.message, request.id))
    except EngineError as error:
        await responses.put(convert.stream_error(short_message(error), request.id))
    except Exception:
        logger.exception("A gRPC stream could not be answered.")
        await responses.put(convert.stream_error(opaque_error().message, request.id))


class _Call:
    """Requests to the application for one gRPC call. They end when the call does."""

    def __init__(self, app: ASGIApp, context: Any) -> None:
        self._app = app
        self._headers: list[Header] = [
            (key.encode(), value if isinstance(value, bytes) else value.encode())
            for key, value in context.invocation_metadata() or ()
            if key in PASSED_ON
        ]
        # As "ipv4:10.0.0.1:4711" or "ipv6:%5B::1%5D:4711"; failed keys are counted by address.
        self._client = context.peer().partition(":")[2].rpartition(":")[0]
        self._gone = asyncio.Event()

    def __enter__(self) -> "_Call":
        return self

    def __exit__(self, *_: object) -> None:
        self._gone.set()

    async def get(self, path: str) -> tuple[int, Any]:
        return await self._whole("GET", path, b"")

    async def post(self, path: str, body: Any) -> Any:
        status, made = await self._whole("POST", path, msgspec.json.encode(body))
        if status != 200:
            raise CallFailed(status, _message(made))
        return made

    async def _whole(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        status, parts = 499, []

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        scope = scope_of(method, path, len(body), self._headers, self._client)
        await call(self._app, scope, body, self._gone, send)
        return status, _decoded(b"".join(parts))

    async def stream(self, path: str, words: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream of `generate_stream`."""
        body = msgspec.json.encode(words)
        scope = scope_of("POST", path, len(body), self._headers, self._client)
        messages: asyncio.Queue[Message | None] = asyncio.Queue(MAX_WAITING)

        async def answer() -> None:
            await call(self._app, scope, body, self._gone, messages.put)
            await messages.put(None)

        calling = asyncio.create_task(answer())
        status, buffered = 499, b""
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    continue
                *events, buffered = (buffered + message.get("body", b"")).split(b"\n\n")
                if status == 200:
                    for event in events:
                        if event.startswith(b"data: "):
                            yield _checked(msgspec.json.decode(event[len(b"data: ") :]))
                elif not message.get("more_body"):
                    raise CallFailed(status, _message(_decoded(buffered)))
        finally:
            calling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await calling


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    if "error" in event:
        raise CallFailed(500, event["error"])
    return event


def _decoded(raw: bytes) -> Any:
    return msgspec.json.decode(raw) if raw else {}


def _message(made: Any) -> str:
    error = made.get("error", "") if isinstance(made, dict) else ""
    return str(error) or "The request failed."


async def _server_live(request: Any, asked: _Call) -> Any:
    status, _ = await asked.get("/v2/health/live")
    return CLASSES["ServerLiveResponse"](live=status == 200)


async def _server_ready(request: Any, asked: _Call) -> Any:
    status, _ = await asked.get("/v2/health/ready")
    return CLASSES["ServerReadyResponse"](ready=status == 200)


async def _model_ready(request: Any, asked: _Call) -> Any:
    status, made = await asked.get(convert.model_path(request.name, request.version) + "/ready")
    if status not in (200, 404, 503):
        raise CallFailed(status, _message(made))
    return CLASSES["ModelReadyResponse"](ready=status == 200)


async def _server_metadata(request: Any, asked: _Call) -> Any:
    return CLASSES["ServerMetadataResponse"](**await _found(asked, "/v2"))


async def _model_metadata(request: Any, asked: _Call) -> Any:
    found = await _found(asked, convert.model_path(request.name, request.version))
    return CLASSES["ModelMetadataResponse"](**found)


async def _found(asked: _Call, path: str) -> Any:
    status, made = await asked.get(path)
    if status != 200:
        raise CallFailed(status, _message(made))
    return made


async def _model_infer(request: Any, asked: _Call) -> Any:
    made = await asked.post(convert.path_of(request, "infer"), convert.to_json(request))
    return convert.from_json(made)


async def _repository_index(request: Any, asked: _Call) -> Any:
    found = await asked.post("/v2/repository/index", {})
    if request.ready:
        found = [each for each in found if each["state"] == "READY"]
    return CLASSES["RepositoryIndexResponse"](models=found)
