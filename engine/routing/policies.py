"""Who should answer: each policy ranks the replicas that could, best first, and says why.

A score is what a policy compares, less being better. A policy never looks at health or limits:
whoever can't take the request is not among its candidates.
"""

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from engine.core.interfaces.backend import EmbedRequest
from engine.routing.prefixes import BLOCK_CHARS, Request, RoutedPrompt
from engine.routing.replica import Member

# A request in flight counts as much as computing so many characters of a prompt.
CHARS_PER_REQUEST = 512
# Nobody gets a request for its prefix while it has more than twice the work of another, and this.
MAX_EXTRA_LOAD = 4


@dataclass(frozen=True)
class Asked:
    """A request, and what policies want to know of it."""

    request: Request

    @property
    def session(self) -> str:
        return "" if isinstance(self.request, EmbedRequest) else self.request.context.session

    @cached_property
    def prompt(self) -> RoutedPrompt:
        return RoutedPrompt(self.request)


@dataclass(frozen=True, slots=True)
class Ranked:
    member: Member
    score: float
    why: str


class Policy(Protocol):
    def rank(self, asked: Asked, members: Sequence[Member]) -> list[Ranked]:
        """Best first; every member is in it. Changes nothing."""
        ...

    def went(self, asked: Asked, member: Member, members: Sequence[Member]) -> None:
        """The request is about to be given to `member`, out of `members`."""
        ...


class RoundRobin:
    """In turn, as often as the weights say, and evenly spread."""

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def rank(self, asked: Asked, members: Sequence[Member]) -> list[Ranked]:
        total = sum(each.weight for each in members)
        ranked = [
            Ranked(each, -self._after(each), f"weight {each.weight:g} of {total:g}")
            for each in members
        ]
        return sorted(ranked, key=lambda each: each.score)

    def went(self, asked: Asked, member: Member, members: Sequence[Member]) -> None:
        for each in members:
            self._credit[each.replica.name] = self._after(each)
        self._credit[member.replica.name] -= sum(each.weight for each in members)

    def _after(self, member: Member) -> float:
        return self._credit.get(member.replica.name, 0.0) + member.weight


class Turns:
    """Whose turn it is among those who are equally loaded."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def sorted(self, asked: Asked, ranked: Sequence[Ranked]) -> list[Ranked]:
        """By score, then by turn."""
        order = self._turns.rank(asked, [each.member for each in ranked])
        place = {each.member.replica.name: number for number, each in enumerate(order)}
        return sorted(ranked, key=lambda each: (each.score, place[each.member.replica.name]))

    def went(self, asked: Asked, member: Member, members: Sequence[Member]) -> None:
        equals = [each for each in members if each.load == member.load]
        self._turns.went(asked, member, equals)


class LeastLoaded:
    """Fewest requests in flight for its weight; among equals in turn."""

    def __init__(self) -> None:
        self._turns = Turns()

    def rank(self, asked: Asked, members: Sequence[Member]) -> list[Ranked]:
        ranked = [Ranked(each, each.load, _load_words(each)) for each in members]
        return self._turns.sorted(asked, ranked)

    def went(self, asked: Asked, member: Member, members: Sequence[Member]) -> None:
        self._turns.went(asked, member, members)


class PowerOfTwo:
    """Two by chance, by weight; the less loaded of them."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def rank(self, asked: Asked, members: Sequence[Member]) -> list[Ranked]:
        order = sorted(members, key=lambda each: -math.log(1 - self._rng.random()) / each.weight)
        drawn = sorted(order[:2], key=lambda each: each.load)
        rest = sorted(order[2:], key=lambda each: each.load)
        return [
            *(Ranked(each, each.load, f"drawn, {_load_words(each)}") for each in drawn),
            *(Ranked(each, each.load, f"not drawn, {_load_words(each)}") for each in rest),
        ]

    def went(self, asked: Asked, member: Member, members: Sequence[Member]) -> None:
        pass


class LongestPrefix:
    """Where least is left to compute: what the replica has not seen of the prompt, more where its
    cache is full and would have to forget for it, and what it is busy with.
    """

    def __init__(self) -> None:
        self._turns = Turns()

    def rank(self, asked: Asked, members: Sequence[Member]) -> list[Ranked]:
        least = min(each.load for each in members)
        ranked = [self._rate(asked.prompt, each, least) for each in members]
        return self._turns.sorted(asked, ranked)

    def went(self, asked: Asked, member: Member, members: Sequence[Member]) -> None:
        self._turns.went(asked, member, members)
        member.replica.seen.add(asked.prompt)

    def _rate(self, prompt: RoutedPrompt, member: Member, least: float) -> Ranked:
        seen = member.replica.seen
        matched = seen.match(prompt)
        is_overloaded = member.load > 2 * least + MAX_EXTRA_LOAD
        missing = prompt.num_blocks - (0 if is_overloaded else matched)
        cost = missing * BLOCK_CHARS * (1 + seen.fullness) + member.load * CHARS_PER_REQUEST
        why = (
            f"has seen {matched * BLOCK_CHARS} of {prompt.num_blocks * BLOCK_CHARS} characters, "
            f"{_load_words(member)}, cache {seen.fullness:.0%} full"
        )
        if is_overloaded:
            why += ", too busy for its prefix to count"
        return Ranked(member, round(cost, 1), why)


class Session:
    """Always the same replica for a session, as long as it can take it, and the same next one when
    it can't: each replica draws a number from the session's name, the best number wins. So when one
    comes or goes, only its own sessions move.
    """

    def __init__(self) -> None:
        self._without = LeastLoaded()  # for requests that name none

    def rank(self, asked: Asked, members: Sequence[Member]) -> list[Ranked]:
        if not asked.session:
            ranked = self._without.rank(asked, members)
            return [Ranked(each.member, each.score, f"no session, {each.why}") for each in ranked]
        drawn = [(_draw(asked.session, each), each) for each in members]
        drawn.sort(key=lambda pair: pair[0])
        return [
            Ranked(each, round(number, 4), f"choice {place} of the session")
            for place, (number, each) in enumerate(drawn, 1)
        ]

    def went(self, asked: Asked, member: Member, members: Sequence[Member]) -> None:
        if not asked.session:
            self._without.went(asked, member, members)


def make_policy(name: str) -> Policy:
    kinds: dict[str, type[Policy]] = {
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
        "power_of_two": PowerOfTwo,
        "prefix": LongestPrefix,
        "session": Session,
    }
    return kinds[name]()


def _draw(session: str, member: Member) -> float:
    """Exponential with the weight as its rate: the least of several is fair to their weights."""
    digest = hashlib.blake2b(f"{session}\n{member.replica.name}".encode(), digest_size=8).digest()
    share = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
    return -math.log(share) / member.weight


def _load_words(member: Member) -> str:
    return f"{member.replica.in_flight} in flight"
