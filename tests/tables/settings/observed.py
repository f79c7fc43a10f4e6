"""What can be seen of a setting in the component that uses it. A look takes the settings."""

import asyncio
import contextlib
import json
import logging
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI

from engine.backends.custom.app import build_server
from engine.backends.custom.engine_settings import engine_options
from engine.core.config import check_exposure
from engine.core.config_schema import Settings
from engine.core.errors import EngineError
from engine.core.interfaces.timeline import PromptDivergence
from engine.core.listening import bind_probes, bind_socket
from engine.core.observability.metrics import Metrics
from engine.routing.build import make_residency
from engine.servers.app import create_app
from engine.servers.fine_tuning import runner
from engine.servers.http.recorder import RecordedFile
from engine.servers.ops import requests
from engine.servers.run import num_frontends
from engine.servers.serving import interp_opening
from tests.support.fakes.fake_backend import CARD, MODEL, FakeBackend
from tests.support.servers.live_server import chat

Look = Callable[[Settings], Any | Awaitable[Any]]
COMPLETION = {"model": MODEL, "prompt": "a b"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def options(settings: Settings) -> dict[str, Any]:
    """The options of an engine that differ from the default ones."""
    usual = msgspec.structs.asdict(engine_options(Settings(), "native"))
    found = msgspec.structs.asdict(engine_options(settings, "native"))
    return {name: each for name, each in found.items() if each != usual[name]}


def tier(name: str) -> Look:
    def look(settings: Settings) -> Any:
        tiers = engine_options(settings, "native").tiers
        return None if tiers is None else getattr(tiers, name)

    return look


def peer(name: str) -> Look:
    def look(settings: Settings) -> Any:
        peers = engine_options(settings, "native").peers
        return None if peers is None else getattr(peers, name)

    return look


def app_of(settings: Settings, backend: FakeBackend | None = None) -> FastAPI:
    return create_app(settings, backend or FakeBackend(), Metrics(MODEL))


def client_of(app: FastAPI, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


def status(method: str, path: str, body: Any = None, times: int = 1, **headers: str) -> Look:
    """The status of the answer to a request, or of the last one of several."""

    async def look(settings: Settings) -> int:
        async with client_of(app_of(settings), **headers) as client:
            for _ in range(times):
                answer = await client.request(method, path, json=body)
        return answer.status_code

    return look


def header(name: str, **sent: str) -> Look:
    """A header of an answer."""

    async def look(settings: Settings) -> str | None:
        async with client_of(app_of(settings), **sent) as client:
            return (await client.get("/v1/models")).headers.get(name)

    return look


def together(body: dict[str, Any]) -> Look:
    """The statuses of two requests at the same time."""

    async def look(settings: Settings) -> list[int]:
        backend = FakeBackend()
        backend.token_s = 0.001
        async with client_of(app_of(settings, backend)) as client:
            both = await asyncio.gather(*(client.post(COMPLETIONS, json=body) for _ in range(2)))
        return sorted(each.status_code for each in both)

    return look


def waiting(body: dict[str, Any]) -> Look:
    """The statuses of two requests, of which the first waits for the second to be answered."""

    async def look(settings: Settings) -> list[int]:
        backend = FakeBackend()
        backend.turn = asyncio.Event()
        async with client_of(app_of(settings, backend)) as client:
            first = asyncio.create_task(client.post(COMPLETIONS, json=body))
            while not (backend.requests or first.done()):
                await asyncio.sleep(0)
            second = asyncio.create_task(client.post(COMPLETIONS, json=body))
            while len(backend.requests) < 2 and not second.done():
                await asyncio.sleep(0)
            backend.turn.set()
            return [(await first).status_code, (await second).status_code]

    return look


def asked(name: str) -> Look:
    """A field of what the backend is asked."""

    async def look(settings: Settings) -> Any:
        backend = FakeBackend()
        async with client_of(app_of(settings, backend)) as client:
            await client.post(COMPLETIONS, json=COMPLETION)
        return getattr(backend.requests[0].context, name)

    return look


def told(path: str, *names: str) -> Look:
    """A part of a JSON answer."""

    async def look(settings: Settings) -> Any:
        async with client_of(app_of(settings)) as client:
            await client.post(COMPLETIONS, json=COMPLETION)
            found = (await client.get(path)).json()
        for name in names:
            found = found[name]
        return found

    return look


def refusal(send: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]], **card: Any) -> Look:
    """The message of an error; None if there is no error."""

    async def look(settings: Settings) -> Any:
        backend = FakeBackend()
        backend.set_card(**card)
        async with client_of(app_of(settings, backend)) as client:
            answer = await send(client)
        return None if answer.status_code == 200 else answer.json()["error"]["message"]

    return look


IMAGE = {"type": "image_url", "image_url": {"url": "http://images.invalid/a.png"}}


def fetch_image(client: httpx.AsyncClient) -> Awaitable[httpx.Response]:
    return client.post(CHAT, json=chat(messages=[{"role": "user", "content": [IMAGE]}]))


IMAGES = (*CARD.capabilities, "images")


def error_of(check: Callable[[Settings], Any]) -> Look:
    """The setting that a check complains about."""

    def look(settings: Settings) -> str | None:
        try:
            check(settings)
        except EngineError as error:
            return error.param
        return None

    return look


exposure = error_of(check_exposure)


def bound(settings: Settings) -> tuple[str, int]:
    with contextlib.closing(bind_socket(settings)) as sock:
        address: tuple[str, int] = sock.getsockname()
        return address


def bound_probes(settings: Settings) -> int | None:
    sock = bind_probes(settings)
    if sock is None:
        return None
    with contextlib.closing(sock):
        return int(sock.getsockname()[1])


def components(settings: Settings) -> list[str]:
    """The classes of what the server starts besides its routes."""
    found = app_of(settings).state.services.components
    return sorted({type(each).__name__ for each in found})


def has(component: str) -> Look:
    return lambda settings: component in components(settings)


def frontends(settings: Settings) -> int:
    return num_frontends(settings.server, is_accelerated=False)


def residency(settings: Settings) -> tuple[bool, int | None, float | None]:
    """Whether the only model can be unloaded, the budget in MiB, and the idle time."""
    server = build_server(settings)
    backend = server.app.state.services.backend.unwrapped
    made = make_residency(settings)
    budget = None if made.budget_bytes is None else made.budget_bytes // 2**20
    return type(backend).__name__ == "Router", budget, made.idle_s


async def drained(settings: Settings) -> Any:
    """How long an unloading waits for requests, if the client does not say."""
    app = app_of(settings)
    waits: list[float] = []

    async def unload(model_id: str, wait_s: float) -> None:
        waits.append(wait_s)

    app.state.services.models.unload = unload
    async with client_of(app) as client:
        await client.post("/v1/admin/models/unload", json={"id": MODEL})
    return waits[0]


async def logged(settings: Settings) -> list[str]:
    """The messages of the log for one request."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("engine"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        async with client_of(app_of(settings)) as client:
            await client.post(COMPLETIONS, json=COMPLETION)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return sorted(each for each in lines if each in ("request", "slow request"))


def traced(name: str) -> Look:
    async def look(settings: Settings) -> Any:
        from engine.core.observability import otel, otel_exporters

        seen: list[Any] = []
        real = otel_exporters.span_exporter

        def exporter(given: Any) -> Any:
            seen.append(given)
            return None

        otel.span_exporter = exporter  # type: ignore[assignment]
        try:
            telemetry = next(
                each
                for each in app_of(settings).state.services.components
                if type(each).__name__ == "Telemetry"
            )
        finally:
            otel.span_exporter = real
        if name == "sampler":
            return telemetry._provider.sampler.get_description()
        if name in ("endpoint", "protocol"):
            return getattr(seen[0], name)
        return getattr(telemetry, name)

    return look


async def stored(settings: Settings) -> Any:
    """How many of three responses are kept, and what is in the storage directory."""
    app = app_of(settings)
    async with client_of(app) as client:
        ids = [await _response(client) for _ in range(3)]
        found = [(await client.get(f"/v1/responses/{each}")).status_code for each in ids]
    await _stop(app)
    return found.count(200)


async def _response(client: httpx.AsyncClient) -> str:
    body = {"model": MODEL, "input": "a"}
    return str((await client.post("/v1/responses", json=body)).json()["id"])


async def _stop(app: FastAPI) -> None:
    for component in reversed(app.state.services.components):
        if type(component).__name__ in ("Database", "Recorder"):
            await component.stop()


def databases(folder: Path) -> Look:
    """Whether a request that stores something leaves a database in the folder."""

    async def look(settings: Settings) -> bool:
        app = app_of(settings)
        async with client_of(app) as client:
            await _response(client)
        await _stop(app)
        return any(folder.glob("*.db"))

    return look


async def kept_for(settings: Settings) -> Any:
    """Seconds for which a stored response is kept."""
    app = app_of(settings)
    objects = app.state.services.objects
    async with client_of(app) as client:
        await _response(client)
    row = await objects.database.run(
        lambda db: db.execute("SELECT kept_until FROM responses").fetchone()
    )
    left = row[0] - objects.now()
    await _stop(app)
    return round(left, -1)


async def uploaded(settings: Settings) -> httpx.Response:
    app = app_of(settings)
    form = {"file": ("a.jsonl", b"x" * (2**20 + 1)), "purpose": (None, "batch")}
    async with client_of(app) as client:
        answer = await client.post("/v1/files", files=form)
    await _stop(app)
    return answer


async def upload_status(settings: Settings) -> int:
    return (await uploaded(settings)).status_code


async def file_life(settings: Settings) -> int:
    body = (await uploaded(settings)).json()
    return int(body["expires_at"] - body["created_at"])


def training(name: str) -> Look:
    """A field of what a training process is told."""

    async def look(settings: Settings) -> Any:
        from engine.servers.fine_tuning import routes
        from tests.support.fakes.scripted_trainer import LINES, TunedBackend

        seen: list[Any] = []

        def make(request: Any, path: Path) -> Any:
            seen.append(request)
            raise EngineError("no more is needed")

        app = app_of(settings, TunedBackend())
        real, routes.make_job = routes.make_job, make
        try:
            async with client_of(app) as client:
                content = "\n".join(map(json.dumps, LINES)).encode()
                form = {"file": ("a.jsonl", content), "purpose": (None, "fine-tune")}
                file = (await client.post("/v1/files", files=form)).json()["id"]
                body = {"model": MODEL, "training_file": file}
                await client.post("/v1/fine_tuning/jobs", json=body)
        finally:
            routes.make_job = real
            await _stop(app)
        return getattr(seen[0], name)

    return look


def results(look: Callable[[Any], Any]) -> Look:
    return lambda settings: look(app_of(settings).state.services.interp_results)


def put_two_mebibytes(store: Any) -> Any:
    try:
        return store.put("a", "tenant", b"x" * 2**21)
    except EngineError as error:
        return error.status


def served_name(settings: Settings) -> str:
    return build_server(settings).model_id


def node_token(settings: Settings) -> bool:
    return app_of(settings).state.nodes is not None


def min_prefill(settings: Settings) -> int | None:
    return app_of(settings).state.nodes._min_prefill_tokens  # type: ignore[no-any-return]


def adapter_status(path: Path) -> Look:
    """The status of an answer to who loads an adapter from a folder, without a key."""
    body = {"lora_name": "a", "lora_path": str(path / "adapter")}
    return status("POST", "/v1/load_lora_adapter", body)


def grpc_port(settings: Settings) -> int | None:
    found = app_of(settings).state.services.components
    ports = [each._settings.grpc_port for each in found if type(each).__name__ == "GrpcServer"]
    return ports[0] if ports else None


def new_file(name: str, content: str = "0123456789abcdef0123") -> Path:
    """A private file in a folder of its own."""
    path = Path(tempfile.mkdtemp(prefix="engine-tests-")) / name
    path.write_text(content)
    path.chmod(0o600)
    return path


def redis_of_limits(settings: Settings) -> str | None:
    url = app_of(settings).state.services.quotas.windows._redis_url
    return None if url is None else str(url.get_secret_value())


async def shown_text(settings: Settings) -> dict[str, Any]:
    """What an explanation shows of a prompt that left the cached one."""
    divergence = PromptDivergence(1, (97,), (98,))
    timeline, record = SimpleNamespace(divergence=divergence), SimpleNamespace(model=MODEL)
    services = app_of(settings).state.services
    return await requests._shown_divergence(services, record, timeline)


async def num_recorded(settings: Settings) -> int:
    """How many of three records are kept."""
    recorder = app_of(settings).state.services.history.recorder
    await recorder.start()
    for number in range(3):
        await recorder._write(f"r{number}.msgpack", RecordedFile(MODEL, []))
    await recorder.stop()
    return len(list((settings.storage.directory / "recorded").iterdir()))


async def holds(settings: Settings) -> bool:
    """Whether training is held while requests are open."""
    found: list[Any] = []

    async def follow(job: Any, folder: Any, process: Any, hold: Any, start: int) -> Any:
        found.append(hold)
        if hold is not None:
            await hold.end()
        return None, 0, 0

    app = app_of(settings)
    jobs = next(
        each for each in app.state.services.components if type(each).__name__ == "JobRunner"
    )
    jobs._follow = follow
    real, runner.TrainerProcess = runner.TrainerProcess, lambda folder: None
    try:
        with contextlib.suppress(AttributeError):  # there is no process to end
            await jobs._attend(None, None, 0)
    finally:
        runner.TrainerProcess = real
    return found[0] is not None


async def capture_bytes(settings: Settings) -> int:
    """The bytes that a request may read of activations."""
    seen: list[int] = []

    def resolve(spec: Any, store: Any, find: Any, max_bytes: int) -> Any:
        seen.append(max_bytes)
        raise EngineError("no more is needed")

    real, interp_opening.resolved = interp_opening.resolved, resolve
    body = COMPLETION | {"interp": {"capture": [{"site": "hook_embed"}]}}
    try:
        async with client_of(app_of(settings)) as client:
            await client.post(COMPLETIONS, json=body)
    finally:
        interp_opening.resolved = real
    return seen[0]


def is_inline(settings: Settings) -> bool:
    """Whether a result of four bytes is sent in the answer."""
    opener = interp_opening.InterpOpener.__new__(interp_opening.InterpOpener)
    opener._services = app_of(settings).state.services
    values = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    return opener._is_small(len(values).to_bytes(8, "little") + values + b"\0" * 4)
