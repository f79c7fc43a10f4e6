"""Finds models by Ollama's names, such as `qwen3:0.6b`, and loads models of the store on demand.

A name with the tag `latest` means the same as the name without it. A tag may also be a part of our
name: `qwen3:0.6b` is `qwen3-0.6b`. In Ollama, every model on the disk can be used. Here, a client
with admin rights can use all models of the store. Other clients can use models that are served.
"""

import asyncio
import math
import re
from collections.abc import Iterable

from starlette.requests import Request

from engine.core.errors import ConfigError, ForbiddenError, InvalidRequestError, NotFoundError
from engine.core.interfaces.backend import ModelCard
from engine.core.store.model_store import ModelStore, StoredModel
from engine.servers.access.auth import may_administer, principal_of
from engine.servers.ops.admin import who_is
from engine.servers.ops.reload import audit_of
from engine.servers.serving.services import Services

LATEST = ":latest"
DEFAULT_KEEP_S = 300.0  # Ollama's
_MAX_NAMED = 20


def tagged(model_id: str) -> str:
    """The name under which clients see a model. Ollama's names always have a tag."""
    return model_id if ":" in model_id else model_id + LATEST


def best_match(name: str, ids: Iterable[str]) -> str | None:
    """The id that `name` means: itself, or the only one that starts like it if case, tags and
    punctuation are ignored.
    """
    wanted, known = name.removesuffix(LATEST), list(ids)
    for each in (name, wanted):
        if each in known:
            return each
    short = _letters(wanted)
    same = [each for each in known if _letters(each) == short]
    found = same or [each for each in known if short and _letters(each).startswith(short)]
    return found[0] if len(found) == 1 and ":" in wanted else None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


class OllamaModels:
    """The models of the server by Ollama's names. `created` maps the models that clients have
    created or copied to the models whose weights they use. They last until the server stops.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._audit = audit_of(services)
        self.created: dict[str, str] = {}

    def served(self, request: Request, name: str) -> str | None:
        """The id of the served model that `name` means, of those that the client may use."""
        allowed = self._services.models_for(principal_of(request))
        return best_match(name, [card.id for card in allowed])

    async def stored(self) -> dict[str, StoredModel]:
        return await asyncio.to_thread(ModelStore().models)

    async def find(self, request: Request, name: str | None) -> ModelCard:
        """The model that will answer. A model of the store is loaded, if the client may do that."""
        if name is None:
            return self._services.choose_model(request, None)
        found = self.served(request, name)
        if found is None and may_administer(request, self._services.keys):
            found = best_match(name, await self.stored())
            if found is not None:
                await self._load(request, found)
        if found is None:
            raise self.unknown(request, name)
        if found not in (name, name.removesuffix(LATEST)):
            self._services.warn(request, "model", f"{found} answers")
        return self._services.choose_model(request, found)

    def unknown(self, request: Request, name: str) -> NotFoundError:
        cards = self._services.models_for(principal_of(request))[:_MAX_NAMED]
        known = ", ".join(card.id for card in cards) or "none"
        return NotFoundError(
            f"model '{name}' not found. Available: {known}.", param="model", code="model_not_found"
        )

    async def _load(self, request: Request, name: str) -> None:
        async with self._audit.change(who_is(request), "models.load", name, model=name):
            try:
                await self._services.models.load(name, name, None, {})
            except ConfigError as error:
                raise InvalidRequestError(error.message, param=error.param) from None

    def keep(self, request: Request, card: ModelCard, seconds: float | None) -> None:
        """Set how long a model stays loaded after its last request. None: as the settings say."""
        is_usual = seconds in (None, DEFAULT_KEEP_S, math.inf)
        if not may_administer(request, self._services.keys):
            if not is_usual:
                what = "has no effect without the administrator's key"
                self._services.warn(request, "keep_alive", what)
            return
        backends = self._services.models.unloadable(card.root or card.id)
        if not backends and not is_usual:
            what = "has no effect: the only model of a server stays loaded"
            self._services.warn(request, "keep_alive", what)
        for each in backends:
            each.keep_s = seconds

    async def load_or_unload(
        self, request: Request, card: ModelCard, keep_alive: float | None
    ) -> str:
        """Handle a request without a prompt, which loads the model, or unloads it if `keep_alive`
        is 0. Returns what was done.
        """
        model_id = card.root or card.id
        if keep_alive != 0:
            self.keep(request, card, keep_alive)
            for backend in self._services.models.unloadable(model_id):
                await backend.load()
            return "load"
        if not may_administer(request, self._services.keys):
            raise ForbiddenError("Unloading a model needs the administrator's key.")
        wait_s = self._services.settings.server.drain_timeout_s
        async with self._audit.change(who_is(request), "models.unload", model_id):
            await self._services.models.unload(model_id, wait_s)
        return "unload"
