"""POST /api/pull, /api/create, /api/copy and DELETE /api/delete, for clients with admin rights.

A created or copied model has no files of its own: it is another name for a served model, with its
own defaults. It lasts until the server stops.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from engine.core.config_presets import ParametersTable, PresetTable
from engine.core.errors import ConfigError, ConflictError, EngineError, ForbiddenError
from engine.core.store.catalogue import CATALOGUE
from engine.core.store.model_store import ModelStore
from engine.core.store.pull import parse_spec, pull
from engine.servers.access.auth import principal_of
from engine.servers.http.errors import (
    AbortedError,
    invalid_request,
    opaque_error,
    plain_error_body,
    problem,
)
from engine.servers.ollama.format import line
from engine.servers.ollama.names import LATEST, OllamaModels, best_match
from engine.servers.ollama.schema import (
    OllamaCopyBody,
    OllamaCreateBody,
    OllamaNamedBody,
    OllamaPullBody,
)
from engine.servers.ops.admin import who_is
from engine.servers.ops.reload import audit_of
from engine.servers.schema.dialects.reading import read_words
from engine.servers.serving.services import Services, json_response
from engine.servers.serving.sse import LineStream

REPORT_EVERY_S = 0.2
_HUBS = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")


def add_change_routes(app: FastAPI, services: Services, models: OllamaModels) -> None:
    audit = audit_of(services)

    @app.post("/api/pull", response_class=LineStream, status_code=200)
    async def pull_model(request: Request) -> Response:
        body = await services.read(request, OllamaPullBody, is_lenient=True)
        spec = _spec(request, body.model_name)
        if body.insecure:
            services.warn(request, "insecure", "connections are verified in any case")

        async def progress() -> AsyncIterator[dict[str, Any]]:
            async with audit.change(who_is(request), "models.pull", spec):
                async for each in _pulled(spec):
                    yield each

        return await _progress_response(progress(), body.stream is not False)

    @app.delete("/api/delete")
    async def delete(request: Request) -> Response:
        body = await services.read(request, OllamaNamedBody, is_lenient=True)
        async with audit.change(who_is(request), "models.delete", body.model_name):
            await _delete(services, models, request, body.model_name)
        return Response()

    @app.post("/api/copy")
    async def copy(request: Request) -> Response:
        body = await services.read(request, OllamaCopyBody, is_lenient=True)
        new_id = _new_id(body.destination, "destination")
        source = await models.find(request, body.source)
        async with audit.change(who_is(request), "models.copy", new_id, source=source.id):
            await _add(services, models, source.root or source.id, new_id)
        return Response()

    @app.post("/api/create", response_class=LineStream, status_code=200)
    async def create(request: Request) -> Response:
        body = await services.read(request, OllamaCreateBody, is_lenient=True)
        if body.base is None:
            raise problem("from", "is needed: the model that the new one is made of")
        new_id = _new_id(body.model_name, "model")
        base = await models.find(request, body.base)
        if body.license:
            services.warn(request, "license", "is not kept")
        given = read_words(body.parameters or {}, {*ParametersTable.model_fields, "stop"})
        for param, message in given.warnings:
            services.warn(request, f"parameters.{param}", message)
        preset = _preset(services.presets.get(base.root or base.id), body.system, given.values)
        async with audit.change(who_is(request), "models.create", new_id, base=base.id):
            await _add(services, models, base.root or base.id, new_id)
            services.presets[new_id] = preset

        async def progress() -> AsyncIterator[dict[str, Any]]:
            yield {"status": f"using the weights of {base.id}"}
            yield {"status": "success"}

        return await _progress_response(progress(), body.stream is not False)


async def _progress_response(
    progress: AsyncIterator[dict[str, Any]], is_streamed: bool
) -> Response:
    """Send the progress as lines, or only its last entry. An error before the first entry is an
    HTTP error; later, it is the last line.
    """
    first = await anext(progress)
    if not is_streamed:
        last = first
        async for each in progress:
            last = each
        return json_response(last)

    async def lines() -> AsyncIterator[bytes]:
        yield line(first)
        try:
            async for each in progress:
                yield line(each)
        except EngineError as error:
            yield plain_error_body(error) + b"\n"

    return StreamingResponse(lines(), media_type=LineStream.media_type)


def _spec(request: Request, name: str) -> str:
    """What to pull: a name of the catalogue, or an address. Addresses need an admin key, because
    the server fetches what they name.
    """
    known = best_match(name, CATALOGUE)
    if known is not None:
        return known
    spec = name.removesuffix(LATEST)
    for hub in _HUBS:
        spec = f"hf:{spec.removeprefix(hub)}" if spec.startswith(hub) else spec
    try:
        parse_spec(spec)
    except ConfigError as error:
        raise problem("model", error.message.rstrip(".")) from None
    if not principal_of(request).is_admin:
        raise ForbiddenError(
            "Without an administrator's key only names that `engine list` shows can be pulled. For"
            " addresses set LLM_ENGINE_ADMIN_KEY and start the server again."
        )
    return spec


class _Report:
    """Receives the progress of a pull in its thread, and passes it to the event loop. `None` ends
    it. After `cancel`, the next report aborts the pull.
    """

    def __init__(self) -> None:
        self.entries: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._is_cancelled = threading.Event()
        self._reported_at = 0.0

    def cancel(self) -> None:
        self._is_cancelled.set()

    def send(self, entry: dict[str, Any] | None) -> None:
        self._loop.call_soon_threadsafe(self.entries.put_nowait, entry)

    def update(self, file: str, done: int, total: int | None) -> None:
        if self._is_cancelled.is_set():
            raise AbortedError("The client left before the model was pulled.")
        now = time.monotonic()
        if done != total and now - self._reported_at < REPORT_EVERY_S:
            return
        self._reported_at = now
        sizes = {"completed": done} if total is None else {"total": total, "completed": done}
        self.send({"status": f"pulling {file}", "digest": file} | sizes)

    def note(self, text: str) -> None:
        self.send({"status": text})


async def _pulled(spec: str) -> AsyncIterator[dict[str, Any]]:
    """Pull a model in a thread, and yield the progress. If the reader leaves, the pull is aborted
    at its next report. The next pull continues from there.
    """
    report = _Report()

    def work() -> None:
        try:
            pull(spec, progress=report)
        finally:
            report.send(None)

    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        yield {"status": "pulling manifest"}
        while (entry := await report.entries.get()) is not None:
            yield entry
        await working
        yield {"status": "success"}
    except EngineError:
        raise
    except Exception as bug:
        raise opaque_error() from bug
    finally:
        report.cancel()


def _new_id(name: str, param: str) -> str:
    new_id = name.removesuffix(LATEST)
    if not new_id.isascii() or not new_id.isprintable() or " " in new_id:
        raise problem(param, "should have only ASCII characters, and no spaces")
    return new_id


def _preset(base: PresetTable | None, system: str | None, given: dict[str, Any]) -> PresetTable:
    """The defaults of a created model: those of its base, with the changes of the request."""
    inherited = {} if base is None else base.model_dump(exclude_none=True)
    stop = given.pop("stop", inherited.get("stop", ()))
    made = {
        "system": system or inherited.get("system"),
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "parameters": inherited.get("parameters", {}) | given,
    }
    try:
        return PresetTable.model_validate(made)
    except ValidationError as error:
        raise invalid_request(error) from None


async def _add(services: Services, models: OllamaModels, model_id: str, new_id: str) -> None:
    """Add the model `new_id`. If it was created before, it is replaced."""
    if new_id == model_id:
        raise ConflictError(f"{new_id} can't be made of itself; choose another name.")
    if new_id in models.created:
        await _forget(services, models, new_id)
    elif new_id in await models.stored():
        raise ConflictError(f"There is a model {new_id} already; choose another name.")
    await services.models.copy(model_id, new_id)
    models.created[new_id] = models.created.get(model_id, model_id)
    if model_id in services.presets:
        services.presets[new_id] = services.presets[model_id]


async def _forget(services: Services, models: OllamaModels, model_id: str) -> None:
    await services.models.remove(model_id, services.settings.server.drain_timeout_s)
    del models.created[model_id]
    services.presets.pop(model_id, None)


async def _delete(services: Services, models: OllamaModels, request: Request, name: str) -> None:
    served = models.served(request, name)
    if served in models.created:
        await _forget(services, models, served)
        return
    stored = best_match(name, await models.stored())
    if stored is None:
        if served is None:
            raise models.unknown(request, name)
        raise ConflictError(f"{served} is not in the model store; the settings name it.")
    for new_id, base in models.created.items():
        if base == stored:
            raise ConflictError(f"{new_id} uses the files of {stored}; delete it first.")
    if served == stored:
        await services.models.remove(stored, services.settings.server.drain_timeout_s)
    await asyncio.to_thread(ModelStore().remove, stored)
