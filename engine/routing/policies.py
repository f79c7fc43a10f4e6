"""Routing policies. A policy ranks the replicas that can take a request, best first, and gives a
reason for each.

Lower scores are better. Policies don't check health and limits: they only get replicas that can
take the request.
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

# In the score of a replica, one request in flight counts as much as this many characters to
# prefill.
CHARS_PER_REQUEST = 512
# The cached prefixes of a replica are ignored while its load is more than twice that of the least
# loaded replica, plus this many requests.
MAX_EXTRA_LOAD = 4


@dataclass(frozen=True)
class RoutedRequest:
    """A request, with its session and the block keys of its prompt, which policies use. `adapter`
    is the LoRA adapter that it asks for.
    """

    request: Request
    adapter: str = ""

    @property
    def session(self) -> str:
        return "" if isinstance(self.request, EmbedRequest) else self.request.context.session

    @cached_property
    def prompt(self) -> RoutedPrompt:
        return RoutedPrompt(self.request, self.adapter)


@dataclass(frozen=True, slots=True)
class Ranked:
    member: Member
    score: float
    why: str


class Policy(Protocol):
    def rank(self, asked: RoutedRequest, members: Sequence[Member]) -> list[Ranked]:
        """Rank all members, best first. Changes nothing."""
        ...

    def went(self, asked: RoutedRequest, member: Member, members: Sequence[Member]) -> None:
        """Record that the request is sent to `member`. `members` are all replicas that could have
        taken it.
        """
        ...


class RoundRobin:
    """Weighted round robin. Replicas with different weights are interleaved evenly."""

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def rank(self, asked: RoutedRequest, members: Sequence[Member]) -> list[Ranked]:
        total = sum(each.weight for each in members)
        ranked = [
            Ranked(each, -self._after(each), f"weight {each.weight:g} of {total:g}")
            for each in members
        ]
        return sorted(ranked, key=lambda each: each.score)

    def went(self, asked: RoutedRequest, member: Member, members: Sequence[Member]) -> None:
        for each in members:
            self._credit[each.replica.name] = self._after(each)
        self._credit[member.replica.name] -= sum(each.weight for each in members)

    def _after(self, member: Member) -> float:
        return self._credit.get(member.replica.name, 0.0) + member.weight


class Turns:
    """Alternates among members with equal scores, by round robin."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def sorted(self, asked: RoutedRequest, ranked: Sequence[Ranked]) -> list[Ranked]:
        """Sort by score, then in round-robin order."""
        order = self._turns.rank(asked, [each.member for each in ranked])
        place = {each.member.replica.name: number for number, each in enumerate(order)}
        return sorted(ranked, key=lambda each: (each.score, place[each.member.replica.name]))

    def went(self, asked: RoutedRequest, member: Member, members: Sequence[Member]) -> None:
        equals = [each for each in members if each.load == member.load]
        self._turns.went(asked, member, equals)


class LeastLoaded:
    """Prefers the member with the fewest requests in flight relative to its weight. Among equal
    members, it uses round robin.
    """

    def __init__(self) -> None:
        self._turns = Turns()

    def rank(self, asked: RoutedRequest, members: Sequence[Member]) -> list[Ranked]:
        ranked = [Ranked(each, each.load, _load_words(each)) for each in members]
        return self._turns.sorted(asked, ranked)

    def went(self, asked: RoutedRequest, member: Member, members: Sequence[Member]) -> None:
        self._turns.went(asked, member, members)


class PowerOfTwo:
    """Takes two members at random, with probabilities in proportion to their weights, and prefers
    the less loaded one.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def rank(self, asked: RoutedRequest, members: Sequence[Member]) -> list[Ranked]:
        order = sorted(members, key=lambda each: -math.log(1 - self._rng.random()) / each.weight)
        drawn = sorted(order[:2], key=lambda each: each.load)
        rest = sorted(order[2:], key=lambda each: each.load)
        return [
            *(Ranked(each, each.load, f"drawn, {_load_words(each)}") for each in drawn),
            *(Ranked(each, each.load, f"not drawn, {_load_words(each)}") for each in rest),
        ]

    def went(self, asked: RoutedRequest, member: Member, members: Sequence[Member]) -> None:
        pass


class LongestPrefix:
    """Prefers the replica that would have the least work to do. The work is the number of prompt
    characters that the replica has not seen, plus a cost for each of its requests in flight. The
    fuller the replica's cache is, the more an unseen character costs: twice as much if the cache
    is full, because it must then evict blocks.
    """

    def __init__(self) -> None:
        self._turns = Turns()

    def rank(self, asked: RoutedRequest, members: Sequence[Member]) -> list[Ranked]:
        least = min(each.load for each in members)
        ranked = [self._rate(asked.prompt, each, least) for each in members]
        return self._turns.sorted(asked, ranked)

    def went(self, asked: RoutedRequest, member: Member, members: Sequence[Member]) -> None:
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
            why += ", too busy: its prefix is ignored"
        return Ranked(member, round(cost, 1), why)


class Session:
    """Sends all requests of a session to the same replica, by rendezvous hashing. A replica's score
    is a hash of the session and the replica's name. The smallest score wins. If that replica can't
    take a request, the replica with the next score gets it. When a replica is added or removed,
    only its own sessions move.
    """

    def __init__(self) -> None:
        self._without = LeastLoaded()  # for requests without a session

    def rank(self, asked: RoutedRequest, members: Sequence[Member]) -> list[Ranked]:
        if not asked.session:
            ranked = self._without.rank(asked, members)
            return [Ranked(each.member, each.score, f"no session, {each.why}") for each in ranked]
        drawn = [(_draw(asked.session, each), each) for each in members]
        drawn.sort(key=lambda pair: pair[0])
        return [
            Ranked(each, round(number, 4), f"choice {place} of the session")
            for place, (number, each) in enumerate(drawn, 1)
        ]

    def went(self, asked: RoutedRequest, member: Member, members: Sequence[Member]) -> None:
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
    """A hash of session and replica name, mapped to an exponentially distributed number whose rate
    is the member's weight. So the probability that a member has the smallest number is proportional
    to its weight.
    """
    digest = hashlib.blake2b(f"{session}\n{member.replica.name}".encode(), digest_size=8).digest()
    share = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
    return -math.log(share) / member.weight


def _load_words(member: Member) -> str:
    return f"{member.replica.in_flight} in flight"
