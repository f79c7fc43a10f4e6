"""The route of a model: its replicas, the choice of one for a request, and the queue of requests
that wait for a free slot.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.core.config_tables import ShadowTable
from engine.core.interfaces.backend import ModelCard
from engine.routing.decisions import Candidate
from engine.routing.policies import Policy, Ranked, RoutedRequest
from engine.routing.replica import Member, Replica, State

# Max number of waiting requests, divided by the number of requests that all replicas together may
# have in flight.
MAX_WAITING_PER_PLACE = 1


@dataclass(frozen=True, slots=True)
class Pick:
    """The choice of a replica. `candidates` says why each other replica was not chosen."""

    chosen: Ranked | None
    candidates: tuple[Candidate, ...]
    among: tuple[Member, ...] = ()  # all replicas that could take the request
    is_full: bool = False  # replicas are available, but all are at their request limit


@dataclass(frozen=True, slots=True)
class _Looked:
    """The state of a replica at the moment when the router chooses one."""

    member: Member
    state: State
    obstacle: str | None  # why the replica can't take a request; None if it can


class Route:
    def __init__(
        self,
        model_id: str,
        members: Sequence[Member],
        policy_name: str,
        policy: Policy,
        *,
        aliases: tuple[str, ...] = (),
        fallbacks: tuple[str, ...] = (),
        shadow: ShadowTable | None = None,
    ) -> None:
        self.id = model_id
        self.members = tuple(members)
        self.policy_name = policy_name
        self.aliases = aliases
        self.fallbacks = fallbacks
        self.shadow = shadow
        self._policy = policy
        self._waiting: deque[asyncio.Future[None]] = deque()

    def has(self, replica: Replica) -> bool:
        return any(member.replica is replica for member in self.members)

    @property
    def is_up(self) -> bool:
        """Whether at least one replica is ready."""
        return any(member.replica.health().ready for member in self.members)

    @property
    def takes_requests(self) -> bool:
        """Whether at least one replica is ready, or will be soon and lets requests wait."""
        return any(member.replica.backend.is_ready for member in self.members)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def pick(self, asked: RoutedRequest, failed: Collection[str] = ()) -> Pick:
        """Choose a replica. Replicas named in `failed` have already failed this request and are not
        chosen. If the caller sends the request to the chosen replica, it must call `went`.
        """
        looked = [
            self._look(member, failed)
            for member in self.members
            if not asked.adapter or asked.adapter in member.replica.backend.adapters
        ]
        usable = [each.member for each in looked if each.obstacle is None]
        if not usable:
            # If no other replica can take the request, an ejected one is tried, or one whose engine
            # is being restarted. There, the request waits.
            usable = [
                each.member
                for each in looked
                if (each.state == "ejected" or each.member.replica.backend.is_ready)
                and each.member.replica.name not in failed
                and not each.member.replica.is_full
            ]
        if not usable:
            is_full = any(
                (each.state == "ejected" or each.member.replica.backend.is_ready)
                and each.member.replica.name not in failed
                for each in looked
            )
            candidates = tuple(_candidate(each, None, None) for each in looked)
            return Pick(None, candidates, is_full=is_full)
        probed = [each for each in usable if each.replica.outlier.wants_probe]
        ranked = self._policy.rank(asked, usable)
        if probed and not failed:
            # A replica whose ejection is over comes first. Only a request can show that it works
            # again.
            ranked.sort(key=lambda each: each.member not in probed)
            first = ranked[0]
            ranked[0] = Ranked(first.member, first.score, "its ejection is over, so it is probed")
        return Pick(ranked[0], _explained(looked, ranked), tuple(usable))

    def went(self, asked: RoutedRequest, pick: Pick) -> None:
        """Tell the policy that the request is sent to the replica that `pick` chose."""
        assert pick.chosen is not None
        self._policy.went(asked, pick.chosen.member, pick.among)

    async def wait(self, seconds: float) -> bool:
        """Wait until a replica may take one more request. Returns False if none can within
        `seconds`. Returns False at once if too many requests wait already.
        """
        places = sum(member.replica.max_concurrent or 0 for member in self.members)
        if len(self._waiting) >= MAX_WAITING_PER_PLACE * places:
            return False
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(seconds):
                await turn
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.wake()  # this request no longer waits, so wake the next one
            raise
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)
        return True

    def wake(self) -> None:
        """Wake the request that has waited longest, because a replica can take one more request."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def wake_all(self) -> None:
        """Wake all waiting requests, so that they look for a replica again. A replica may have
        become available although no request has ended, for example because it has become ready.
        """
        for _ in range(len(self._waiting)):
            self.wake()

    def _look(self, member: Member, failed: Collection[str]) -> _Looked:
        replica = member.replica
        health = replica.health()
        state = replica.state(health)
        obstacle = None
        if replica.name in failed:
            obstacle = "it has failed this request"
        elif state in ("down", "loading"):
            obstacle = f"{state}: {health.detail.rstrip('.')}"
        elif replica.is_full:
            obstacle = f"full: {replica.in_flight} of {replica.max_concurrent} in flight"
        elif replica.outlier.is_out:
            obstacle = f"ejected for {replica.outlier.seconds_left:.1f} s more"
        elif state == "ejected" and not replica.outlier.wants_probe:
            obstacle = "ejected, and a request is probing it already"
        return _Looked(member, state, obstacle)


def _explained(looked: Sequence[_Looked], ranked: list[Ranked]) -> tuple[Candidate, ...]:
    by_name = {each.member.replica.name: each for each in ranked}
    return tuple(
        _candidate(each, by_name.get(each.member.replica.name), ranked[0]) for each in looked
    )


def _candidate(looked: _Looked, ranked: Ranked | None, chosen: Ranked | None) -> Candidate:
    name = looked.member.replica.name
    if ranked is None or chosen is None:
        return Candidate(name, looked.state, None, looked.obstacle)
    if ranked.member is chosen.member:
        return Candidate(name, looked.state, ranked.score, None, ranked.why)
    first = f"{chosen.member.replica.name} comes first"
    if chosen.score < ranked.score:
        first += f", {chosen.score:g} against {ranked.score:g}"
    why_not = f"{first} ({ranked.why})"
    return Candidate(name, looked.state, ranked.score, why_not, ranked.why)


T = TypeVar("T")


def combined_card(model_id: str, cards: Sequence[ModelCard]) -> ModelCard:
    """A model card for several backends of one model. A request that is valid for this card is
    valid for each of the backends.
    """
    lacks = tuple(dict.fromkeys(name for card in cards for name in card.lacks))
    emulated = dict.fromkeys(name for card in cards for name in card.emulated)
    trained = [card.trained_context for card in cards if card.trained_context is not None]
    return ModelCard(
        id=model_id,
        created=min(card.created for card in cards),
        owned_by=_same([card.owned_by for card in cards]) or "engine",
        max_model_len=min(card.max_model_len for card in cards),
        backend="+".join(dict.fromkeys(card.backend for card in cards)),
        quantization=_same([card.quantization for card in cards]),
        num_params=_same([card.num_params for card in cards]),
        size_bytes=_same([card.size_bytes for card in cards]),
        capabilities=_in_all([card.capabilities for card in cards]),
        emulated=tuple(name for name in emulated if name not in lacks),
        lacks=lacks,
        template_options=_in_all([card.template_options for card in cards]),
        trained_context=min(trained, default=None),
        num_dimensions=_same([card.num_dimensions for card in cards]),
        cache_identity=_same([card.cache_identity for card in cards]),
        recommended=_same([card.recommended for card in cards]),
    )


def _in_all(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(name for name in names[0] if all(name in each for each in names))


def _same(values: Sequence[T | None]) -> T | None:
    """The common value if all values are equal, else None."""
    return values[0] if all(value == values[0] for value in values) else None
