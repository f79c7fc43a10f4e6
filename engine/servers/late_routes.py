"""Routes that few clients ask for, added when the model is ready or the first request wants one.

Importing them takes as long as half of the other routes' start, and nobody waits for them at first.
"""

import asyncio
from collections.abc import Sequence
from importlib import import_module

from fastapi import FastAPI
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.servers.services import Services


def add_routes(app: FastAPI, services: Services, target: str) -> None:
    """Add the routes of a function, named as "module:function"."""
    module, _, function = target.partition(":")
    getattr(import_module(f"engine.servers.{module}"), function)(app, services)


class LateRoutes:
    def __init__(self, app: FastAPI, services: Services, targets: Sequence[str]) -> None:
        self._app = app
        self._services = services
        self._targets = list(targets)
        self._adding = asyncio.Lock()

    async def add(self) -> None:
        """Add what is left, and start the components that come with it."""
        async with self._adding:
            while self._targets:
                target = self._targets[0]
                module = target.partition(":")[0]
                await asyncio.to_thread(import_module, f"engine.servers.{module}")
                known = len(self._services.components)
                add_routes(self._app, self._services, target)
                for component in self._services.components[known:]:
                    await component.start()
                self._targets.pop(0)

    def may_want(self, scope: Scope) -> bool:
        """No route that is there already matches the request."""
        if not self._targets or scope["type"] != "http":
            return False
        return all(route.matches(scope)[0] is Match.NONE for route in self._app.router.routes)


class LateGate:
    """Lets a request wait for routes that are not there yet."""

    def __init__(self, app: ASGIApp, late: LateRoutes) -> None:
        self._app = app
        self._late = late

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._late.may_want(scope):
            await self._late.add()
        await self._app(scope, receive, send)
