"""vLLM's administrative endpoints: /sleep, /wake_up, /is_sleeping and /reset_prefix_cache.

A sleeping server has no model in memory and refuses requests until it is woken. An unloaded model
is different: the next request loads it.
"""

import asyncio
from typing import Annotated

from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import ConflictError, InvalidRequestError
from engine.servers.ops.admin import who_is
from engine.servers.ops.reload import audit_of
from engine.servers.serving.services import Services, json_response


class Sleeper:
    """Frees the memory of all models, and loads them again."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._changing = asyncio.Lock()
        self._asleep: list[str] = []  # ids of the models to load again

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    async def sleep(self) -> None:
        """Refuse new requests, wait for running ones, and unload every loaded model. Requests that
        still run after `server.drain_timeout_s` are aborted.
        """
        services = self._services
        async with self._changing:
            if self.is_sleeping:
                return
            loaded = [
                model["id"] for model in services.models.describe() if model["state"] == "loaded"
            ]
            services.lifecycle.pause()
            try:
                for model_id in loaded:
                    wait_s = services.settings.server.drain_timeout_s
                    await services.models.unload(model_id, wait_s)
                    self._asleep.append(model_id)
            except BaseException:
                await self._wake()
                raise

    async def wake_up(self) -> None:
        async with self._changing:
            await self._wake()

    async def _wake(self) -> None:
        for model_id in list(self._asleep):
            await self._services.models.load(model_id, model_id, None, {})
            self._asleep.remove(model_id)
        if not self._services.lifecycle.resume():
            raise ConflictError("The server is shutting down; it can't be woken.")


def add_sleep_routes(app: FastAPI, services: Services) -> None:
    audit, sleeper = audit_of(services), Sleeper(services)

    @app.post("/sleep")
    async def sleep(
        request: Request, level: Annotated[int, Query(ge=1, le=2)] = 1, mode: str = "wait"
    ) -> Response:
        """Both of vLLM's levels free the weights and the KV cache. The weights are not kept in
        another memory.
        """
        if mode != "wait":
            raise InvalidRequestError(
                "mode should be wait: running requests are finished first.", param="mode"
            )
        async with audit.change(who_is(request), "sleep", level=level):
            await sleeper.sleep()
        return json_response({"is_sleeping": True})

    @app.post("/wake_up")
    async def wake_up(
        request: Request, tags: Annotated[list[str] | None, Query(max_length=8)] = None
    ) -> Response:
        if tags and set(tags) != {"weights", "kv_cache"}:
            raise InvalidRequestError(
                "tags can't be used: weights and KV cache are only loaded together.", param="tags"
            )
        async with audit.change(who_is(request), "wake_up"):
            await sleeper.wake_up()
        return json_response({"is_sleeping": False})

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": sleeper.is_sleeping})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        async with audit.change(who_is(request), "cache.flush"):
            done = await services.backend.flush_prefixes()
        return json_response({"done": done})

    @app.post("/start_profile")
    @app.post("/stop_profile")
    async def profile() -> Response:
        raise InvalidRequestError(
            "A running server can't be profiled; `engine dev profile_inference` profiles a model."
        )
