"""/v1/admin/models loads and unloads models. /v1/admin/cache flushes and warms prefix caches."""

from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from engine.backends.custom.engine_settings import has_engine
from engine.core.config_tables import ModelId, refuse_secrets
from engine.core.errors import ConfigError, ForbiddenError, InvalidRequestError
from engine.core.store.catalogue import CATALOGUE
from engine.core.store.model_store import ModelStore
from engine.servers.access.auth import SERVER, principal_of
from engine.servers.ops.admin import who_is
from engine.servers.ops.reload import audit_of
from engine.servers.ops.warming import MAX_PROMPTS, tenants_of, warm
from engine.servers.schema import fields
from engine.servers.serving.services import Services, json_response


class AdminBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


class LoadBody(AdminBody):
    """A model to load. `model` is a name from `engine list`; with an admin key, other models are
    possible too. Clients use the model under the name `id`, by default `model`.
    """

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    id: ModelId | None = None
    backend: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    options: Annotated[dict[str, Any], Field(max_length=64)] = {}


class SwapBody(AdminBody):
    """A model whose engines are replaced by new ones. They run `model` if it is given, with the
    same options except for `options`.
    """

    id: ModelId
    model: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    options: Annotated[dict[str, Any], Field(max_length=64)] = {}


class NamedBody(AdminBody):
    id: ModelId
    # Max seconds to wait for running requests. The default is `server.drain_timeout_s`.
    wait_s: Annotated[float, Field(ge=0, le=3600)] | None = None


class FlushBody(AdminBody):
    model: fields.ModelName | None = None


class WarmBody(AdminBody):
    prompts: Annotated[list[str | dict[str, Any]], Field(min_length=1, max_length=MAX_PROMPTS)]
    model: fields.ModelName | None = None
    tenant: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    most: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] | None = None


def add_admin_models_routes(app: FastAPI, services: Services) -> None:
    manager = services.models
    audit = audit_of(services)

    @app.get("/v1/admin/models")
    async def models() -> Response:
        return json_response({"models": manager.describe(services.lifecycle.num_admitted)})

    @app.post("/v1/admin/models/load")
    async def load(request: Request) -> Response:
        body = await services.read(request, LoadBody)
        model_id = body.id or body.model
        async with audit.change(who_is(request), "models.load", model_id, model=body.model):
            _check_origin(request, body.model, body.backend, body.options)
            try:
                await manager.load(model_id, body.model, body.backend, body.options)
            except ConfigError as error:
                raise InvalidRequestError(error.message, param=error.param) from None
        return json_response({"id": model_id, "state": "loaded"})

    @app.post("/v1/admin/models/unload")
    async def unload(request: Request) -> Response:
        body = await services.read(request, NamedBody)
        async with audit.change(who_is(request), "models.unload", body.id):
            was_loaded = await manager.unload(body.id, _patience(services, body))
        return json_response({"id": body.id, "state": "unloaded", "was_loaded": was_loaded})

    @app.post("/v1/admin/models/swap")
    async def swap(request: Request) -> Response:
        body = await services.read(request, SwapBody)
        async with audit.change(
            who_is(request), "models.swap", body.id, model=body.model
        ) as detail:
            _check_origin(request, body.model, None, body.options)
            try:
                detail |= await manager.swap(body.id, body.model, body.options)
            except ConfigError as error:
                raise InvalidRequestError(error.message, param=error.param) from None
        return json_response({"id": body.id, "state": "loaded"} | detail)

    @app.post("/v1/admin/models/remove")
    async def remove(request: Request) -> Response:
        body = await services.read(request, NamedBody)
        async with audit.change(who_is(request), "models.remove", body.id):
            await manager.remove(body.id, _patience(services, body))
        return json_response({"id": body.id, "state": "removed"})

    _add_cache_routes(app, services)


def _add_cache_routes(app: FastAPI, services: Services) -> None:
    audit = audit_of(services)

    @app.post("/v1/admin/cache/flush")
    async def flush(request: Request) -> Response:
        body = await services.read(request, FlushBody)
        model = "" if body.model is None else services.find_model(body.model, SERVER).id
        async with audit.change(who_is(request), "cache.flush", model):
            done = await services.backend.flush_prefixes(model=model)
        return json_response({"done": done})

    @app.post("/v1/admin/cache/warm")
    async def warm_up(request: Request) -> Response:
        body = await services.read(request, WarmBody)
        async with audit.change(who_is(request), "cache.warm", body.model or "") as detail:
            tenants = tenants_of(services, body.tenant)
            done = await warm(services, body.prompts, tenants, body.model, body.most)
            detail |= done
        return json_response(done)


def _patience(services: Services, body: NamedBody) -> float:
    return services.settings.server.drain_timeout_s if body.wait_s is None else body.wait_s


def _check_origin(
    request: Request, model: str | None, backend: str | None, options: dict[str, Any]
) -> None:
    """Refuse options that contain secrets. If the request has no admin key, also refuse all
    options, external backends, and models that `engine list` does not show.
    """
    try:
        refuse_secrets(options)
    except ValueError as error:
        raise InvalidRequestError(f"options: {error}", param="options") from None
    if principal_of(request).is_admin:
        return
    is_known = model is None or model in CATALOGUE or model in ModelStore().models()
    is_ours = backend is None or has_engine(backend)
    if not is_known or not is_ours or options:
        raise ForbiddenError(
            "Without an administrator's key only names that `engine list` shows can be loaded, by"
            " engines of our own and without options. For anything else set LLM_ENGINE_ADMIN_KEY"
            " and start the server again."
        )
