"""Chooses the engine for a request: by what each has cached of its prompt, and by its load.

The cost of an engine is the number of prompt tokens that it would have to compute, plus a cost for
each of its open requests. The fuller its KV pool is, the more a token costs. The time of a decision
does not grow with the number of engines: of a group with equal prefixes, a few are compared.
"""

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from engine.core.interfaces.request import CachedPrefixes, GenerateRequest
from engine.core.prefix_hashes import UNIT_TOKENS, prompt_hashes
from engine.routing.nodes.table import RoutingTable

# An open request costs as much as this many tokens of prefill.
TOKENS_PER_REQUEST = 128
# The cached prefixes of an engine are ignored while its load is more than twice that of the least
# loaded engine, plus this many requests.
MAX_EXTRA_LOAD = 4
MAX_GROUPS = 4
MAX_COMPARED = 8  # engines of one group whose load is compared
# An engine is expected to cache a prompt that it was sent. If it does not report that within this
# time, it has not.
EXPECTED_S = 30.0


class Placeable(Protocol):
    """An engine to which requests can be sent."""

    @property
    def load(self) -> int:
        """Number of its open requests."""
        ...

    @property
    def fullness(self) -> float:
        """The used share of its KV pool, from 0 to 1."""
        ...


class ChosenEngine(NamedTuple):
    """The engine for a request, and why."""

    engine: int
    num_cached: int  # prompt tokens that it has cached
    load: int

    @property
    def why(self) -> str:
        return f"has {self.num_cached} tokens of the prompt cached, {self.load} open requests"


class _Expected(NamedTuple):
    """Prefixes that an engine was not known to have when a request was sent to it."""

    until: float
    engine: int
    prefixes: list[int]


class RequestRouter:
    """Routes requests to engines, which have small numbers."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.table = RoutingTable()
        self._engines: dict[int, Placeable] = {}
        self._usable = 0  # set of engines that may get requests
        self._rng = rng or random.Random()
        self._expected: deque[_Expected] = deque()
        # For each engine, the prefixes that are expected and not reported yet.
        self._unreported: dict[int, set[int]] = {}

    def add(self, engine: Placeable) -> int:
        """Returns the number of a new engine. It gets no requests until `set_usable`."""
        number = next(each for each in range(len(self._engines) + 1) if each not in self._engines)
        self._engines[number] = engine
        self._unreported[number] = set()
        return number

    def remove(self, engine: int) -> None:
        self.set_usable(engine, False)
        del self._engines[engine]
        del self._unreported[engine]
        self.table.drop(engine)

    def engine(self, number: int) -> Placeable:
        return self._engines[number]

    def set_usable(self, engine: int, is_usable: bool) -> None:
        if is_usable:
            self._usable |= 1 << engine
        else:
            self._usable &= ~(1 << engine)

    def update_routing_table(self, engine: int, news: CachedPrefixes) -> None:
        """An engine has reported how its cache changed."""
        unreported = self._unreported[engine]
        if news.is_all:
            self.table.drop(engine)
            unreported.clear()
        self.table.remove(engine, news.removed)
        self.table.add(engine, news.added)
        unreported.difference_update(news.added)

    def num_cached(self, engine: int, request: GenerateRequest) -> int:
        """How many tokens of a prompt an engine has cached."""
        prefixes = prompt_hashes(request.salt, request.prompt)
        length, group = next(self.table.matches(prefixes, 1 << engine, 1), (0, 0))
        return length * UNIT_TOKENS if group else 0

    def route_request(self, request: GenerateRequest, among: int = -1) -> ChosenEngine | None:
        """Choose one of the engines in the set `among` and expect it to cache the prompt. None if
        none is usable.
        """
        usable = self._usable & among
        if not usable & (usable - 1):  # at most one, so nothing has to be compared
            return self._only(usable)
        # Prompts that embeddings are made of, and those whose logprobs are wanted, use no cache.
        is_cached = not (request.pools or request.params.score_prompt)
        prefixes = prompt_hashes(request.salt, request.prompt) if is_cached else []
        choice = self._best(len(request.prompt), prefixes, usable)
        self._expect(choice.engine, prefixes)
        return choice

    def _only(self, usable: int) -> ChosenEngine | None:
        if not usable:
            return None
        number = usable.bit_length() - 1
        return ChosenEngine(number, 0, self._engines[number].load)

    def _best(self, num_tokens: int, prefixes: Sequence[int], usable: int) -> ChosenEngine:
        candidates = []
        for length, group in self.table.matches(prefixes, usable, MAX_GROUPS):
            number = min(self._sample(group), key=self._rank)
            load = self._engines[number].load
            candidates.append(ChosenEngine(number, length * UNIT_TOKENS, load))
        limit = 2 * min(each.load for each in candidates) + MAX_EXTRA_LOAD
        return min(candidates, key=lambda each: self._cost(each, num_tokens, limit))

    def _cost(self, choice: ChosenEngine, num_tokens: int, limit: int) -> float:
        known = choice.num_cached if choice.load <= limit else 0
        weight = 1 + self._engines[choice.engine].fullness
        return max(0, num_tokens - known) * weight + choice.load * TOKENS_PER_REQUEST

    def _rank(self, engine: int) -> tuple[int, float]:
        """Sorts engines that have the same of a prompt."""
        each = self._engines[engine]
        return each.load, each.fullness

    def _sample(self, group: int) -> list[int]:
        """Some engines of a set, from a random one on; all of them if they are few."""
        chance = self._rng.random
        if group.bit_count() <= MAX_COMPARED:
            numbers = list(_bits(group))
            start = int(chance() * len(numbers))
            return numbers[start:] + numbers[:start]
        width = group.bit_length()
        found = []
        for _ in range(MAX_COMPARED):
            start = int(chance() * width)
            above = group >> start
            found.append(start + (above & -above).bit_length() - 1)
        return found

    def _expect(self, engine: int, prefixes: Sequence[int]) -> None:
        self._forget_expected()
        new = self.table.missing(engine, prefixes)
        if new:
            self.table.add(engine, new)
            self._unreported[engine].update(new)
            self._expected.append(_Expected(time.monotonic() + EXPECTED_S, engine, new))

    def _forget_expected(self) -> None:
        now = time.monotonic()
        while self._expected and self._expected[0].until < now:
            _, engine, prefixes = self._expected.popleft()
            if unreported := self._unreported.get(engine):
                late = unreported.intersection(prefixes)
                unreported -= late
                self.table.remove(engine, late)


def _bits(numbers: int) -> Iterator[int]:
    while numbers:
        low = numbers & -numbers
        yield low.bit_length() - 1
        numbers ^= low
