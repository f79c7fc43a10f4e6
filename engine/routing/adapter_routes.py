"""LoRA adapters behind the router. Each backend of a model has the model's adapters, so any of them
can answer a request for one.
"""

import logging
from collections.abc import Mapping, Sequence

from engine.backends.base import InferenceBackend
from engine.core.errors import EngineError, InvalidRequestError, NotFoundError
from engine.core.interfaces.backend import ModelCard
from engine.routing.route import Route

log = logging.getLogger(__name__)


def route_of(name: str, routes: Sequence[Route]) -> Route | None:
    """The model that has an adapter of this name. None: there is no such adapter."""
    for route in routes:
        if any(name in each.adapters for each in _backends(route)):
            return route
    return None


def adapter_cards(route: Route, base: ModelCard) -> list[ModelCard]:
    """The cards of a model's adapters. `base` is the card of the model."""
    names = dict.fromkeys(name for each in _backends(route) for name in each.adapters)
    return [adapter_card(name, route, base) for name in names]


def adapter_card(name: str, route: Route, base: ModelCard) -> ModelCard:
    """The card of one adapter. When it was added is unknown while its backend is not loaded."""
    cards = (card for each in _backends(route) for card in each.models())
    told = next((card for card in cards if card.id == name), base)
    return base.of_adapter(name, told.created, told.tenant)


async def load_adapter(
    name: str, path: str, base: str | None, routes: Sequence[Route], *, replaces: bool
) -> None:
    """Load an adapter into all backends of its model, or into none of them."""
    taken = {each for route in routes for each in (route.id, *route.aliases)}
    owner = route_of(name, routes)
    if name in taken or (owner is not None and not replaces):
        raise InvalidRequestError(
            f"The lora adapter '{name}' has already been loaded.", param="lora_name"
        )
    route = _base(base, routes)
    if owner not in (None, route):
        raise InvalidRequestError(
            f"The lora adapter '{name}' is one of another model.", param="lora_name"
        )
    begun: list[InferenceBackend] = []
    try:
        for backend in _backends(route):
            had = name in backend.adapters
            await backend.load_adapter(name, path, replaces=replaces)
            if not had:
                begun.append(backend)
    except EngineError:
        for backend in begun:
            await backend.unload_adapter(name)
        raise


async def unload_adapter(name: str, routes: Sequence[Route]) -> None:
    route = route_of(name, routes)
    if route is None:
        raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
    for backend in _backends(route):
        if name in backend.adapters:
            await backend.unload_adapter(name)


async def restore_adapters(backend: InferenceBackend, adapters: Mapping[str, str]) -> None:
    """Serve these adapters and no others: those that were served before the model was unloaded."""
    for name in backend.adapters.keys() - adapters.keys():
        await backend.unload_adapter(name)
    for name, path in adapters.items():
        if backend.adapters.get(name) == path:
            continue
        try:
            await backend.load_adapter(name, path, replaces=True)
        except EngineError as error:
            log.warning("the adapter %s is not served any more: %s", name, error.message)


def _base(base: str | None, routes: Sequence[Route]) -> Route:
    if base is None and len(routes) > 1:
        known = ", ".join(route.id for route in routes)
        raise InvalidRequestError(
            f"base_model_name is needed, because several models are served: {known}.",
            param="base_model_name",
        )
    for route in routes:
        if base in (None, route.id, *route.aliases):
            return route
    raise NotFoundError(f"There is no model '{base}' here.", param="base_model_name")


def _backends(route: Route) -> list[InferenceBackend]:
    return [member.replica.backend for member in route.members]
