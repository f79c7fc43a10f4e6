"""Routes below /v1/admin: draining, the log level, limits, API keys, plugins, and the audit log."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from engine.core import key_file
from engine.core.config_schema import LimitsSettings
from engine.core.config_tables import ModelId
from engine.core.errors import ConfigError, ConflictError, InvalidRequestError, NotFoundError
from engine.core.key_file import LIMIT_NAMES, KeyEntry
from engine.plugins.backend import PluggedBackend, describe
from engine.servers.ops.admin import who_is
from engine.servers.ops.admin_models import AdminBody
from engine.servers.ops.audit import AuditLog
from engine.servers.ops.reload import audit_of, reread, set_log_level
from engine.servers.serving.services import Services, json_response

NUM_SHOWN = 100

Rate = Annotated[int, Field(ge=1, le=10**9)] | None
Tokens = Annotated[int, Field(ge=1, le=10**12)] | None
Places = Annotated[int, Field(ge=1, le=65536)] | None
KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@-]{1,64}$")]
T = TypeVar("T")


class LevelBody(AdminBody):
    level: Literal["debug", "info", "warning", "error"]


class LimitsBody(AdminBody):
    """New limits. A limit that is missing in the body stays unchanged; null removes a limit."""

    requests_per_minute: Rate = None
    tokens_per_minute: Tokens = None
    max_concurrent: Places = None
    max_queued: Places = None
    max_queued_tokens: Tokens = None

    def given(self) -> dict[str, Any]:
        return self.model_dump(include=set(LIMIT_NAMES) & self.model_fields_set)


class KeyBody(LimitsBody):
    name: KeyName
    tenant: KeyName | None = None
    role: Literal["user", "admin"] = "user"
    parse_special: bool = False
    models: Annotated[list[ModelId], Field(min_length=1, max_length=256)] | None = None


class EmptyBody(AdminBody):
    pass


def add_admin_control_routes(app: FastAPI, services: Services) -> None:
    audit, lifecycle = audit_of(services), services.lifecycle

    @app.get("/v1/admin/status")
    async def status() -> Response:
        return json_response(_status(services, audit))

    @app.post("/v1/admin/drain")
    async def drain(request: Request) -> Response:
        await services.read(request, EmptyBody)
        async with audit.change(who_is(request), "drain"):
            lifecycle.pause()
        return json_response({"draining": True, "in_flight": lifecycle.num_admitted})

    @app.post("/v1/admin/undrain")
    async def undrain(request: Request) -> Response:
        await services.read(request, EmptyBody)
        async with audit.change(who_is(request), "undrain"):
            if not lifecycle.resume():
                raise ConflictError("The server is shutting down; it can't be undrained.")
        return json_response({"draining": False})

    @app.post("/v1/admin/log-level")
    async def log_level(request: Request) -> Response:
        body = await services.read(request, LevelBody)
        async with audit.change(who_is(request), "log_level", body.level) as detail:
            detail |= await set_log_level(services, body.level)
        return json_response({"level": body.level} | detail)

    @app.post("/v1/admin/limits")
    async def limits(request: Request) -> Response:
        body = await services.read(request, LimitsBody)
        async with audit.change(who_is(request), "limits", **body.given()):
            defaults = services.quotas.defaults
            services.quotas.set_defaults(defaults.model_copy(update=body.given()))
        return json_response({"limits": _limits(services.quotas.defaults)})

    @app.post("/v1/admin/reload")
    async def reload(request: Request) -> Response:
        await services.read(request, EmptyBody)
        try:
            return json_response(await reread(services, who_is(request)))
        except ConfigError as error:
            raise InvalidRequestError(error.message, param=error.param) from None

    @app.get("/v1/admin/audit")
    async def changes() -> Response:
        return json_response({"changes": await audit.newest(NUM_SHOWN)})

    _add_keys_routes(app, services, audit)


def _add_keys_routes(app: FastAPI, services: Services, audit: AuditLog) -> None:
    lock = asyncio.Lock()

    async def changed(change: Callable[[Path], T]) -> T:
        """Apply `change` to the keys file, then load the keys from that file. So the change takes
        effect at once and is still there after a restart.
        """
        path = services.settings.server.keys_file
        if path is None:
            raise ConflictError(
                "There is no keys file: name one in server.keys_file and start the server again."
            )
        async with lock:
            try:
                made = await asyncio.to_thread(change, path)
                await asyncio.to_thread(services.keys.load, services.settings.server)
            except ConfigError as error:
                raise InvalidRequestError(error.message) from None
        return made

    @app.get("/v1/admin/keys")
    async def keys() -> Response:
        return json_response({"keys": [key.public() for key in services.keys.entries]})

    @app.post("/v1/admin/keys")
    async def new_key(request: Request) -> Response:
        body = await services.read(request, KeyBody)
        async with audit.change(who_is(request), "keys.new", body.name, role=body.role):
            key, entry = await changed(
                lambda path: key_file.add_key(
                    path,
                    body.name,
                    tenant=body.tenant,
                    role=body.role,
                    parse_special=body.parse_special,
                    models=body.models,
                    limits=body.given(),
                )
            )
        return json_response({"key": key} | entry.public())

    @app.delete("/v1/admin/keys/{name}")
    async def remove_key(request: Request, name: str) -> Response:
        async with audit.change(who_is(request), "keys.remove", name[:64]):
            gone: KeyEntry = await changed(lambda path: _remove(services, path, name))
        return json_response({"removed": gone.name})

    @app.post("/v1/admin/keys/{name}/limits")
    async def key_limits(request: Request, name: str) -> Response:
        body = await services.read(request, LimitsBody)
        async with audit.change(who_is(request), "keys.limits", name[:64], **body.given()):
            entry = await changed(lambda path: key_file.set_limits(path, name, body.given()))
        return json_response(entry.public())


def _remove(services: Services, path: Path, name: str) -> KeyEntry:
    """Remove a key from the keys file. The last key for clients can't be removed, because without
    any key all clients would be accepted.
    """
    users = [key for key in key_file.read_keys(path) if key.role == "user"]
    is_last = [key.name for key in users] == [name]
    if is_last and services.settings.server.api_key is None:
        raise ConflictError(f"'{name}' is the only key for clients; make another one first.")
    return key_file.remove_key(path, name)


def _limits(limits: LimitsSettings) -> dict[str, int | None]:
    return {name: getattr(limits, name) for name in LIMIT_NAMES}


def _status(services: Services, audit: AuditLog) -> dict[str, Any]:
    health, lifecycle = services.backend.health(), services.lifecycle
    return {
        "ready": health.ready and not lifecycle.is_draining,
        "detail": health.detail,
        "draining": lifecycle.is_draining,
        "in_flight": lifecycle.num_admitted,
        "max_concurrent": lifecycle.max_concurrent,
        "total_requests": lifecycle.total_requests,
        "memory_mb": round(services.backend.memory_bytes() / 2**20, 1),
        "memory_budget_mb": services.settings.server.memory_budget_mb,
        "log_level": logging.getLevelName(logging.getLogger().level).lower(),
        "limits": _limits(services.quotas.defaults),
        "keys": len(services.keys.credentials),
        "in_use": [
            {"key": key, "in_flight": count, "queued": queued}
            for key, count, queued in services.quotas.in_use()
        ],
        "audit_log": audit.path.name,
    }


def add_plugins_routes(app: FastAPI, services: Services) -> None:
    audit = audit_of(services)

    @app.get("/v1/admin/plugins")
    async def plugins() -> Response:
        backend = services.backend
        hosts = backend.hosts if isinstance(backend, PluggedBackend) else []
        return json_response({"plugins": [describe(host) for host in hosts]})

    @app.post("/v1/admin/plugins/{name}/enable")
    async def enable(name: str, request: Request) -> Response:
        await services.read(request, EmptyBody)
        backend = services.backend
        host = backend.find(name) if isinstance(backend, PluggedBackend) else None
        if host is None:
            raise NotFoundError("There is no such plugin in use here.", param="name")
        async with audit.change(who_is(request), "plugins.enable", host.name):
            host.enable()
        return json_response(describe(host))
