"""The models that a router serves: their names, their replicas, and the model that answers for a
name.
"""

from collections.abc import Sequence

import msgspec

from engine.backends.base import Resolved
from engine.core.errors import NotFoundError, UnavailableError
from engine.core.interfaces.backend import ModelCard
from engine.routing.adapter_routes import adapter_card, adapter_cards, route_of
from engine.routing.attempts import RETRY_AFTER_S
from engine.routing.replica import Replica
from engine.routing.route import Route, combined_card


class RouteTable:
    """The first of `routes` is the default model. `replicas` may have some that no model uses, for
    shadow traffic.
    """

    def __init__(self, replicas: Sequence[Replica], routes: Sequence[Route]) -> None:
        self.replicas = list(replicas)
        self.routes = list(routes)
        self._by_name: dict[str, Route] = {}
        self._served_by: dict[str, list[Route]] = {}
        self._index()

    def find(self, name: str) -> Route | None:
        """The model of this name or alias. Adapters are not found."""
        return self._by_name.get(name)

    def route(self, model: str) -> Route:
        """The model of this name, or the one that has an adapter of this name. An empty name is
        the default model.
        """
        route = self._by_name.get(model) if model else self.routes[0]
        route = route or route_of(model, self.routes)
        if route is None:
            raise NotFoundError("There is no such model here.", param="model")
        return route

    def served_by(self, replica: Replica) -> Sequence[Route]:
        """The models that a replica serves. Empty if it was removed."""
        return self._served_by.get(replica.name, ())

    def add(self, route: Route, replica: Replica | None = None) -> None:
        """Add a model whose replica already runs. There must be no model with this name yet. If
        `replica` is None, the model only has replicas of other models.
        """
        assert route.id not in self._by_name, route.id
        self.routes.append(route)
        if replica is not None:
            self.replicas.append(replica)
        self._index()

    def remove(self, route: Route) -> list[Replica]:
        """Remove a model. Returns replicas that no model uses any more. The caller stops them."""
        self.routes.remove(route)
        self._index()
        left = [replica for replica in self.replicas if not self._served_by[replica.name]]
        own = [each for each in left if route.has(each)]
        for replica in own:
            self.replicas.remove(replica)
        return own

    def cards(self) -> list[ModelCard]:
        cards = []
        for route in self.routes:
            card = _card(route)
            if card is not None:
                cards.append(card)
                cards += [
                    msgspec.structs.replace(card, id=alias, root=card.id) for alias in route.aliases
                ]
                cards += adapter_cards(route, card)
        return cards

    def resolve(self, name: str | None) -> Resolved | None:
        """The card of the model that answers for this name now: the model itself, or the first of
        its fallbacks that has a ready backend if it has none.
        """
        route = self.routes[0] if name is None else self._by_name.get(name)
        if route is None:
            return None if name is None else self._resolved_adapter(name)
        if not route.is_up:
            for other in (self._by_name[each] for each in route.fallbacks):
                card = _card(other)
                if other.is_up and card is not None:
                    return Resolved(card, f"no backend of {route.id} is up; {other.id} answers")
        card = _card(route)
        if card is None:
            raise UnavailableError(f"{route.id} is still loading.", retry_after=RETRY_AFTER_S)
        if name is None or name == route.id:
            return Resolved(card)
        return Resolved(msgspec.structs.replace(card, id=name, root=route.id))

    def _resolved_adapter(self, name: str) -> Resolved | None:
        """No other model answers for an adapter."""
        route = route_of(name, self.routes)
        card = None if route is None else _card(route)
        if route is None or card is None:
            return None
        return Resolved(adapter_card(name, route, card))

    def _index(self) -> None:
        self._by_name = {
            name: route for route in self.routes for name in (route.id, *route.aliases)
        }
        self._served_by = {
            replica.name: [route for route in self.routes if route.has(replica)]
            for replica in self.replicas
        }


def _card(route: Route) -> ModelCard | None:
    cards = [card for each in route.members if (card := each.replica.card()) is not None]
    return combined_card(route.id, cards) if cards else None
