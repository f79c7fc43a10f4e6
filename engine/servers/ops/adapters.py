"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and answers. They
serve a LoRA adapter, or no longer, while the server runs. Only an administrator may call them. On a
server without keys, everyone may, but only with adapters of certain folders.
"""

import asyncio
from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine.core.config_tables import ModelId
from engine.core.errors import ForbiddenError
from engine.core.folders import store_directory
from engine.core.store.adapter_store import adapters_directory, real_path
from engine.servers.access.auth import principal_of
from engine.servers.ops.admin import who_is
from engine.servers.ops.reload import audit_of
from engine.servers.serving.services import Services


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


class LoadAdapterBody(_Body):
    """`base_model_name` is checked: the adapter is for the model that is served."""

    lora_name: ModelId
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    base_model_name: ModelId | None = None
    load_inplace: bool = False  # replaces an adapter that has this name


class UnloadAdapterBody(_Body):
    lora_name: ModelId
    lora_int_id: Annotated[int, Field(ge=0, le=2**31)] | None = (
        None  # adapters have no numbers here
    )


def add_adapter_routes(app: FastAPI, services: Services) -> None:
    audit = audit_of(services)

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        body = await services.read(request, LoadAdapterBody)
        name, base = body.lora_name, body.base_model_name
        async with audit.change(who_is(request), "adapters.load", name, path=body.lora_path):
            path = await asyncio.to_thread(_allowed, services, request, body.lora_path)
            await services.backend.load_adapter(name, path, base=base, replaces=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        name = (await services.read(request, UnloadAdapterBody)).lora_name
        async with audit.change(who_is(request), "adapters.unload", name):
            await services.backend.unload_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _allowed(services: Services, request: Request, path: str) -> str:
    """The path without symbolic links. Without an admin key, it must be in one of our stores, or
    in `model.adapter_directory`. Nothing is said about files elsewhere.
    """
    if principal_of(request).is_admin:
        return path
    own = services.settings.model.adapter_directory
    roots = (adapters_directory(), store_directory(), *((own,) if own is not None else ()))
    full = real_path(path)
    if not any(full.is_relative_to(real_path(str(root))) for root in roots):
        raise ForbiddenError(
            "Without an administrator's key only adapters in model.adapter_directory and in the"
            " store (`engine adapters add`) can be loaded. For others set LLM_ENGINE_ADMIN_KEY and"
            " start the server again.",
            param="lora_path",
        )
    return str(full)
