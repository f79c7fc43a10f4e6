"""The Open Inference Protocol by gRPC, on `server.grpc_port`.

Each call becomes a request to the REST route of the same purpose, in the same process. So API keys,
limits, admission, metrics and the request log are those of HTTP. The key is in the call's metadata,
under the name of the HTTP header. It is checked before a message is read, so every method is served
as a stream: gRPC reads the message of other methods before it calls anybody.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from engine.core.config_schema import ServerSettings
from engine.core.errors import ConfigError, EngineError, RateLimitError
from engine.core.text.long_texts import after_other_long_texts
from engine.servers.access.auth import Principal
from engine.servers.http.errors import opaque_error, short_message
from engine.servers.http.in_process import scope_of
from engine.servers.http.limits import INLINE_BYTES
from engine.servers.http.protocol import max_connections

try:
    import grpc
    import grpc.aio

    from engine.servers.kserve import grpc_convert as convert
    from engine.servers.kserve.grpc_call import Call, CallFailed, message_of, shown
    from engine.servers.kserve.grpc_messages import CLASSES, SERVICE, UNARY
    from engine.servers.kserve.grpc_stream import Stream
except ImportError as missing:
    raise ConfigError(
        f"server.grpc_port needs the library {missing.name}: install engine[grpc], or remove the"
        " setting",
        param="server.grpc_port",
    ) from None

logger = logging.getLogger(__name__)
Identify = Callable[[Request], Principal | None]
Answer = Callable[[Any, Call], Awaitable[Any]]

STOP_TIMEOUT_S = 5.0
# A message is larger than the prompt in it: it has names, shapes and parameters.
MESSAGE_MARGIN = 2**16
MAX_STREAMS = 64  # open streams of one tenant
# Methods that need no key, as their routes.
PUBLIC = frozenset({"ServerLive", "ServerReady"})
KEYED_ROUTE = "/v2"  # a route that needs a key like those of the other methods
# Limits of a connection, as options of the library.
CONNECTION = {
    "grpc.max_concurrent_streams": 128,
    "grpc.max_metadata_size": 16 * 1024,
    "grpc.absolute_max_metadata_size": 16 * 1024,
    "grpc.server_handshake_timeout_ms": 10_000,
    "grpc.http2.settings_timeout": 10_000,
    "grpc.max_connection_idle_ms": 60_000,  # without an open call
    "grpc.keepalive_time_ms": 30_000,  # a client that does not answer a ping is gone
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.http2.max_ping_strikes": 2,
    # What arrives of a message before anybody reads it, such as before the key is checked. The
    # library would otherwise allow megabytes for each call.
    "grpc.http2.bdp_probe": 0,
    "grpc.http2.lookahead_bytes": 64 * 1024,
    "grpc.so_reuseport": 0,  # otherwise two servers may share a port without an error
}
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


@dataclass(frozen=True, slots=True)
class _Route:
    path: str


class GrpcServer:
    """A background component of the server that answers gRPC calls on its event loop. `identify`
    tells whose key a request has.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, identify: Identify) -> None:
        if "kserve" not in settings.dialects:
            raise ConfigError(
                'server.grpc_port needs "kserve" in server.dialects', param="server.grpc_port"
            )
        self._app = app
        self._settings = settings
        self._identify = identify
        self._max_bytes = settings.body_limit_mb * 2**20 + MESSAGE_MARGIN
        self._num_streams: Counter[str] = Counter()  # by tenant
        self._num_calls: Counter[str] = Counter()  # by tenant, of one message each
        self._max_calls = max(1, max_connections() // 2)  # of one tenant
        self._server: Any = None
        self.port = 0  # the bound port, once the server has started

    async def start(self) -> None:
        host, port = self._settings.host, self._settings.grpc_port
        most = max_connections()
        options = CONNECTION | {
            "grpc.max_receive_message_length": self._max_bytes,
            "grpc.max_allowed_incoming_connections": most,
        }
        self._server = grpc.aio.server(
            options=list(options.items()),
            maximum_concurrent_rpcs=most,  # the application counts requests, whose keys it knows
        )
        self._server.add_generic_rpc_handlers([self._handlers()])
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        files = self._settings.tls_files
        try:
            if files is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, _credentials(files))
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
        answers: dict[str, Answer] = {
            "ServerLive": _server_live,
            "ServerReady": _server_ready,
            "ModelReady": _model_ready,
            "ServerMetadata": _server_metadata,
            "ModelMetadata": _model_metadata,
            "ModelInfer": _model_infer,
            "RepositoryIndex": _repository_index,
        }
        methods = {
            name: grpc.stream_stream_rpc_method_handler(
                self._guarded(self._unary(name, answers[name]), is_public=name in PUBLIC),
                response_serializer=CLASSES[f"{name}Response"].SerializeToString,
            )
            for name in UNARY
        }
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._guarded(self._stream),
            response_serializer=CLASSES["ModelStreamInferResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _guarded(self, answer: Callable[..., Awaitable[None]], *, is_public: bool = False) -> Any:
        """A handler that answers a call whose key is valid. Its errors tell nothing of the server's
        inside, and end only the call.
        """

        async def handle(_: Any, context: Any) -> None:
            code, message = grpc.StatusCode.INTERNAL, opaque_error().message
            try:
                with Call(self._app, context) as asked:
                    principal = None if is_public else await self._principal(asked)
                    await answer(asked, context, principal)
                    return
            except CallFailed as failed:
                code, message = CODES.get(failed.status, code), failed.message
            except EngineError as error:
                code, message = CODES.get(error.status, code), short_message(error)
            except grpc.aio.UsageError:
                return  # the client is gone
            except Exception:
                logger.exception("A gRPC call could not be answered.")
            await context.abort(code, shown(message))

        return handle

    async def _principal(self, asked: Call) -> Principal:
        """Whose call it is. The refusal of an invalid key is that of HTTP, which is logged, counted
        and slowed down.
        """
        scope = scope_of("GET", KEYED_ROUTE, 0, asked.headers, asked.client)
        found = self._identify(Request(scope | {"route": _Route(KEYED_ROUTE)}))
        if found is None:
            status, made = await asked.get(KEYED_ROUTE)
            raise CallFailed(401 if status == 200 else status, message_of(made))
        return found

    def _unary(self, name: str, answer: Answer) -> Callable[..., Awaitable[None]]:
        async def handle(asked: Call, context: Any, principal: Principal | None) -> None:
            if principal is None:  # whoever sends no message would hold a place without a key
                await context.write(await answer(None, asked))
                return
            with _place(self._num_calls, principal.name, self._max_calls, "calls"):
                request = await asked.read_only(f"{name}Request")
                await context.write(await answer(request, asked))

        return handle

    async def _stream(self, asked: Call, context: Any, principal: Principal) -> None:
        with _place(self._num_streams, principal.name, MAX_STREAMS, "streams"):
            await Stream(asked, context, self._max_bytes).run()


@contextmanager
def _place(places: Counter[str], tenant: str, most: int, what: str) -> Iterator[None]:
    if places[tenant] >= most:
        raise RateLimitError(
            f"{most} {what} are open; wait until one of them ends.", retry_after=1.0
        )
    places[tenant] += 1
    try:
        yield
    finally:
        places[tenant] -= 1
        if not places[tenant]:
            del places[tenant]


def _credentials(files: Sequence[Path]) -> Any:
    """The server's certificate and key, as HTTP has them."""
    cert, key = (path.expanduser().read_bytes() for path in files)
    return grpc.ssl_server_credentials([(key, cert)])


async def _server_live(request: Any, asked: Call) -> Any:
    status, _ = await asked.get("/v2/health/live")
    return CLASSES["ServerLiveResponse"](live=status == 200)


async def _server_ready(request: Any, asked: Call) -> Any:
    status, _ = await asked.get("/v2/health/ready")
    return CLASSES["ServerReadyResponse"](ready=status == 200)


async def _model_ready(request: Any, asked: Call) -> Any:
    status, made = await asked.get(convert.model_path(request.name, request.version) + "/ready")
    if status not in (200, 404, 503):
        raise CallFailed(status, message_of(made))
    return CLASSES["ModelReadyResponse"](ready=status == 200)


async def _server_metadata(request: Any, asked: Call) -> Any:
    return CLASSES["ServerMetadataResponse"](**await _found(asked, "/v2"))


async def _model_metadata(request: Any, asked: Call) -> Any:
    found = await _found(asked, convert.model_path(request.name, request.version))
    if "versions" not in found:  # the name led to another route
        raise CallFailed(404, "There is no such model.")
    return CLASSES["ModelMetadataResponse"](**found)


async def _found(asked: Call, path: str) -> Any:
    status, made = await asked.get(path)
    if status != 200:
        raise CallFailed(status, message_of(made))
    return made


async def _model_infer(request: Any, asked: Call) -> Any:
    path = convert.path_of(request, "infer")
    is_long = request.ByteSize() > INLINE_BYTES
    body = (
        await after_other_long_texts(convert.to_json, request)
        if is_long
        else convert.to_json(request)
    )
    return convert.from_json(await asked.post(path, body))


async def _repository_index(request: Any, asked: Call) -> Any:
    found = await asked.post("/v2/repository/index", {})
    if request.ready:
        found = [each for each in found if each["state"] == "READY"]
    return CLASSES["RepositoryIndexResponse"](models=found)
