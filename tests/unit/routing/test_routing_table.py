"""The routing table against a plain one, and the choice among many engines."""

import random

from engine.core.interfaces.request import CachedPrefixes, GenerateRequest, SamplingParams
from engine.core.prefix_hashes import UNIT_TOKENS, prompt_hashes
from engine.routing.nodes import request_router
from engine.routing.nodes.request_router import RequestRouter
from engine.routing.nodes.table import RoutingTable


class Engine:
    def __init__(self, load: int = 0, fullness: float = 0.0) -> None:
        self.load = load
        self.fullness = fullness


def plain_groups(held: dict[int, set[int]], prefixes: list[int], usable: set[int]):
    """For each engine, how many of the prefixes it has from the start on."""
    found: dict[int, int] = {}
    for engine in usable:
        has = [each in held.get(engine, ()) for each in prefixes]
        found[engine] = has.index(False) if False in has else len(has)
    return found


def test_routing_table_matches_equal_a_brute_force_table() -> None:
    rng = random.Random(1)
    for _ in range(200):
        table, held = RoutingTable(), {}
        chains = [[rng.getrandbits(64) for _ in range(9)] for _ in range(4)]
        for _ in range(40):
            engine, chain = rng.randrange(12), rng.choice(chains)
            if rng.random() < 0.2:
                table.drop(engine)
                held[engine] = set()
                continue
            own = held.setdefault(engine, set())
            length = rng.randrange(10)
            # What is evicted is the end of a prefix.
            table.add(engine, chain[:length])
            table.remove(engine, chain[length:])
            own.update(chain[:length])
            own.difference_update(chain[length:])
            assert table.count(engine) == len(own)
        usable = set(rng.sample(range(12), rng.randrange(1, 12)))
        chain = rng.choice(chains)
        groups = table.matches(chain, sum(1 << each for each in usable), max_groups=12)
        got = {each: count for count, group in groups for each in usable if group >> each & 1}
        assert got == plain_groups(held, chain, usable)
        for engine in list(held):
            table.drop(engine)
        assert len(table) == 0


def ask(tokens: list[int], salt: str = "") -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt=tuple(tokens), params=SamplingParams(), salt=salt)


def router_of(*engines: Engine) -> RequestRouter:
    router = RequestRouter(random.Random(0))
    for each in engines:
        router.set_usable(router.add(each), True)
    return router


def test_a_cached_prefix_outweighs_a_small_load_only() -> None:
    tokens = list(range(10 * UNIT_TOKENS))
    router = router_of(Engine(), Engine(load=2), Engine())
    router.update_routing_table(1, CachedPrefixes(tuple(prompt_hashes("", tokens))))
    choice = router.route_request(ask(tokens))
    assert choice is not None and choice.engine == 1 and choice.num_cached == 9 * UNIT_TOKENS
    router.engine(1).load = 5  # more than twice the least, plus four
    assert router.route_request(ask(tokens)).engine != 1
    assert router_of(Engine(), Engine(load=1)).route_request(ask(tokens, "salt")).engine == 0
    assert router_of(Engine(fullness=0.9), Engine()).route_request(ask(tokens)).engine == 1


def test_a_prompt_in_flight_counts_as_cached_for_a_while(monkeypatch) -> None:
    tokens = list(range(8 * UNIT_TOKENS))
    router = router_of(*(Engine() for _ in range(50)))
    first = router.route_request(ask(tokens)).engine
    assert {router.route_request(ask(tokens)).engine for _ in range(20)} == {first}
    # An engine that does not report it has not cached it.
    now = request_router.time.monotonic() + request_router.EXPECTED_S + 1
    monkeypatch.setattr(request_router.time, "monotonic", lambda: now)
    others = {router.route_request(ask(list(range(each, each + 300)))).engine for each in range(30)}
    assert len(others) > 10 and not router.table.has(first, prompt_hashes("", tokens)[-1])


def test_engines_that_leave_are_forgotten_and_their_numbers_reused() -> None:
    tokens = list(range(300))
    router = router_of(Engine(), Engine())
    router.update_routing_table(1, CachedPrefixes(tuple(prompt_hashes("", tokens))))
    router.remove(1)
    assert len(router.table) == 0 and router.add(Engine()) == 1
    assert router.route_request(ask(tokens)).engine == 0  # the new one is not usable yet
    router.set_usable(0, False)
    assert router.route_request(ask(tokens)) is None
