"""DELETE /v1/models/{model}: the owner of a fine-tuned model deletes it."""

import asyncio
import contextlib

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import ForbiddenError, NotFoundError
from engine.core.interfaces.backend import ModelCard
from engine.core.store.adapter_store import remove_adapter
from engine.servers.access.auth import may_administer, principal_of
from engine.servers.ops.admin import who_is
from engine.servers.ops.reload import audit_of
from engine.servers.serving.services import Services, json_response


def add_fine_tuned_models_routes(app: FastAPI, services: Services) -> None:
    @app.delete("/v1/models/{model_id:path}")
    async def delete_model(request: Request, model_id: str) -> Response:
        """Delete a fine-tuned model. Only the tenant that trained it may, or an administrator."""
        card = services.find_model(model_id, principal_of(request))
        _check_deletable(services, request, card)
        async with audit_of(services).change(who_is(request), "models.delete", card.id):
            await services.backend.unload_adapter(card.id)
            with contextlib.suppress(NotFoundError):  # the settings name it, not the store
                await asyncio.to_thread(remove_adapter, card.id)
        return json_response({"id": card.id, "object": "model", "deleted": True})


def _check_deletable(services: Services, request: Request, card: ModelCard) -> None:
    if card.parent is None:
        raise ForbiddenError(
            f"{card.id} is no fine-tuned model. An administrator removes other models with `engine"
            " admin remove`."
        )
    if card.tenant != principal_of(request).name and not may_administer(request, services.keys):
        raise ForbiddenError("Only the administrator may delete a model that all clients share.")
