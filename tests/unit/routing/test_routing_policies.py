"""Who is ranked first, and what moves when something changes."""

import random
from collections import Counter
from typing import Any

from engine.core.interfaces.backend import ChatRequest, CompletionRequest, GenerationContext
from engine.core.interfaces.request import SamplingParams
from engine.routing.policies import (
    MAX_EXTRA_LOAD,
    LeastLoaded,
    LongestPrefix,
    Policy,
    PowerOfTwo,
    RoundRobin,
    RoutedRequest,
    Session,
)
from engine.routing.prefixes import BLOCK_CHARS, MAX_AGE_S, MAX_BLOCKS, RoutedPrompt, SeenPrefixes
from engine.routing.replica import (
    CONSECUTIVE_FAILURES,
    FIRST_EJECTION_S,
    FORGIVEN_AFTER_S,
    MAX_EJECTION_S,
    MIN_IN_WINDOW,
    Member,
    Outlier,
    Replica,
)
from tests.support.fakes.fake_backend import FakeBackend


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def members(*weights: float) -> list[Member]:
    return [
        Member(Replica(f"r{number}", "fake", FakeBackend()), weight)
        for number, weight in enumerate(weights)
    ]


def completion(prompt: str | tuple[int, ...] = "", **context: Any) -> CompletionRequest:
    context = {"request_id": "r", "params": SamplingParams()} | context
    return CompletionRequest(context=GenerationContext(**context), prompt=prompt)


def chat(*contents: str, **fields: Any) -> ChatRequest:
    roles = ("user", "assistant")
    messages = tuple(
        {"role": roles[number % 2], "content": content} for number, content in enumerate(contents)
    )
    context = GenerationContext(
        request_id="r", params=SamplingParams(), salt=fields.pop("salt", "")
    )
    return ChatRequest(context=context, messages=messages, **fields)


def give(policy: Policy, among: list[Member], asked: RoutedRequest) -> str:
    """Rank, and send the request to the first."""
    first = policy.rank(asked, among)[0].member
    policy.went(asked, first, among)
    first.replica.take()
    return first.replica.name


def test_round_robin_follows_weights_and_interleaves() -> None:
    among, policy, asked = members(5, 1, 1), RoundRobin(), RoutedRequest(completion())
    turns = [give(policy, among, asked) for _ in range(14)]
    assert turns[:7] == turns[7:]
    assert Counter(turns) == {"r0": 10, "r1": 2, "r2": 2}
    assert "r0 r0 r0" not in " ".join(turns[:3])


def test_a_replica_that_was_away_is_not_flooded_when_it_returns() -> None:
    among, policy, asked = members(1, 1), RoundRobin(), RoutedRequest(completion())
    for _ in range(10):
        give(policy, among[:1], asked)
    turns = [give(policy, among, asked) for _ in range(6)]
    assert Counter(turns) == {"r0": 3, "r1": 3}


def test_least_loaded_counts_by_weight_and_takes_turns_among_equals() -> None:
    among, policy, asked = members(1, 3), LeastLoaded(), RoutedRequest(completion())
    assert Counter(give(policy, among, asked) for _ in range(40)) == {"r0": 10, "r1": 30}


def test_equally_loaded_replicas_take_turns() -> None:
    among, policy, asked = members(1, 1), LeastLoaded(), RoutedRequest(completion())
    among[1].replica.in_flight = 5  # the first gets all for a while
    for _ in range(5):
        give(policy, among, asked)
    turns = []
    for _ in range(4):
        turns.append(give(policy, among, asked))
        next(each for each in among if each.replica.name == turns[-1]).replica.release()
    assert turns in (["r0", "r1"] * 2, ["r1", "r0"] * 2)


def test_power_of_two_takes_the_better_of_two_and_never_the_worst_of_three() -> None:
    among, policy, asked = (
        members(1, 1, 1),
        PowerOfTwo(random.Random(1)),
        RoutedRequest(completion()),
    )
    for number, member in enumerate(among):
        member.replica.in_flight = number
    firsts = Counter(policy.rank(asked, among)[0].member.replica.name for _ in range(300))
    assert set(firsts) == {"r0", "r1"} and firsts["r0"] > firsts["r1"] > 50
    assert len(policy.rank(asked, among)) == 3


def test_a_session_stays_on_its_replica_unless_that_is_lost() -> None:
    among, policy = members(1, 1, 2), Session()

    def first(session: str, left: list[Member]) -> str:
        return policy.rank(RoutedRequest(completion(session=session)), left)[0].member.replica.name

    sessions = [f"s{number}" for number in range(1000)]
    before = {each: first(each, among) for each in sessions}
    share = Counter(before.values())
    assert 200 < share["r0"] < 300 and 200 < share["r1"] < 300 and 450 < share["r2"] < 550
    after = {each: first(each, among[:2]) for each in sessions}
    moved = [each for each in sessions if after[each] != before[each]]
    assert moved == [each for each in sessions if before[each] == "r2"]


def test_without_a_session_the_least_loaded_replica_is_chosen() -> None:
    among, policy = members(1, 1), Session()
    among[0].replica.in_flight = 1
    best = policy.rank(RoutedRequest(completion()), among)[0]
    assert best.member is among[1] and "no session" in best.why


def test_a_conversation_stays_on_the_replica_that_has_its_prefix() -> None:
    among, policy = members(1, 1), LongestPrefix()
    turns = ["x" * 300, "y" * 300, "z" * 300]
    homes = {
        name: give(policy, among, RoutedRequest(chat(name * 100, *turns[:1])))
        for name in ("a", "b")
    }
    assert set(homes.values()) == {"r0", "r1"}
    for member in among:
        member.replica.in_flight = 0
    for name, home in homes.items():
        ranked = policy.rank(RoutedRequest(chat(name * 100, *turns)), among)
        assert ranked[0].member.replica.name == home
        assert ranked[0].why.startswith("has seen 384 of 1024 characters")


def test_a_hot_prefix_does_not_overload_one_replica() -> None:
    among, policy = members(1, 1), LongestPrefix()
    hot = "h" * (MAX_BLOCKS * BLOCK_CHARS)
    for number in range(40):
        give(policy, among, RoutedRequest(completion(f"{hot} {number}")))
    loads = sorted(member.replica.in_flight for member in among)
    assert loads[1] <= 2 * loads[0] + MAX_EXTRA_LOAD + 1
    assert sum(loads) == 40


def test_new_conversations_with_one_system_prompt_are_spread_as_caches_fill() -> None:
    among, policy = members(1, 1), LongestPrefix()
    for member in among:
        member.replica.seen.resize(16_000)  # tokens: 1000 blocks
    system = "s" * 1280
    for number in range(40):
        name = give(policy, among, RoutedRequest(completion(system + str(number) * 6400)))
        next(each for each in among if each.replica.name == name).replica.release()
    assert min(member.replica.num_requests for member in among) >= 10


def test_tenants_share_no_prefixes() -> None:
    seen = SeenPrefixes()
    seen.add(RoutedPrompt(chat("a" * 640, salt="one")))
    assert seen.match(RoutedPrompt(chat("a" * 640, salt="one"))) == 10
    assert seen.match(RoutedPrompt(chat("a" * 640, salt="two"))) == 0


def test_a_prefix_matches_only_up_to_the_first_difference() -> None:
    seen = SeenPrefixes()
    seen.add(RoutedPrompt(completion(tuple(range(160)))))
    assert seen.match(RoutedPrompt(completion((*range(80), *range(80))))) == 5
    assert seen.match(RoutedPrompt(completion((1, *range(1, 160))))) == 0
    tools = ({"type": "function", "function": {"name": "f"}},)
    seen.add(RoutedPrompt(chat("a" * 640)))
    assert seen.match(RoutedPrompt(chat("a" * 640, tools=tools))) == 0


def test_seen_prefixes_are_bounded_and_path_beginnings_stay_longest() -> None:
    seen = SeenPrefixes(capacity=10)
    seen.add(RoutedPrompt(completion("a" * 640)))
    seen.add(RoutedPrompt(completion("b" * 320)))
    assert len(seen) == 10 and seen.fullness == 1.0
    assert seen.match(RoutedPrompt(completion("a" * 640))) == 5
    assert seen.match(RoutedPrompt(completion("b" * 640))) == 5
    assert RoutedPrompt(completion("c" * 10**6)).num_blocks == MAX_BLOCKS


def test_old_prefixes_are_not_matched() -> None:
    clock = Clock()
    seen = SeenPrefixes(clock=clock)
    seen.add(RoutedPrompt(completion("a" * 640)))
    clock.now += MAX_AGE_S - 1
    seen.add(RoutedPrompt(completion("a" * 320)))
    clock.now += 2
    assert seen.match(RoutedPrompt(completion("a" * 640))) == 5
    seen.forget_old()
    assert len(seen) == 5


def test_consecutive_failures_eject_for_longer_each_time() -> None:
    clock = Clock()
    record = Outlier(clock)
    assert [record.fail(True) for _ in range(CONSECUTIVE_FAILURES)] == [False, False, True]
    out_s = FIRST_EJECTION_S
    for _ in range(8):
        assert record.is_out and record.seconds_left == min(out_s, MAX_EJECTION_S)
        clock.now += record.seconds_left
        assert record.wants_probe
        record.begin()
        assert not record.wants_probe and record.is_ejected
        assert record.fail(True)
        out_s *= 2
    clock.now += MAX_EJECTION_S
    record.begin()
    record.succeed()
    assert not record.is_ejected
    clock.now += FORGIVEN_AFTER_S + 1
    for _ in range(CONSECUTIVE_FAILURES):
        record.fail(True)
    assert record.seconds_left == FIRST_EJECTION_S


def test_a_high_failure_rate_ejects_too() -> None:
    record = Outlier(Clock())
    for _ in range(3):
        assert not record.fail(True) and not record.fail(True)
        record.succeed()
    assert record.fail(True)


def test_the_last_replica_is_not_ejected_and_an_abandoned_probe_is_repeated() -> None:
    clock = Clock()
    record = Outlier(clock)
    assert not any(record.fail(False) for _ in range(20))
    record.fail(True)
    clock.now += MAX_EJECTION_S
    record.begin()
    record.abandon()
    assert record.wants_probe


def test_failures_before_a_downtime_do_not_count_for_ejection() -> None:
    record = Outlier(Clock())
    for _ in range(MIN_IN_WINDOW):
        record.fail(False)
    record.reset_failures()
    assert not record.fail(True)


def test_power_of_two_draws_by_weight() -> None:
    among, policy, asked = (
        members(1, 1, 8),
        PowerOfTwo(random.Random(1)),
        RoutedRequest(completion()),
    )
    firsts = Counter(policy.rank(asked, among)[0].member.replica.name for _ in range(600))
    assert firsts["r2"] > 300 > firsts["r0"] + firsts["r1"] > 0


def test_prefixes_seen_again_are_evicted_later() -> None:
    seen = SeenPrefixes(capacity=10)
    for letter in "aba":
        seen.add(RoutedPrompt(completion(letter * 5 * BLOCK_CHARS)))
    seen.add(RoutedPrompt(completion("c" * 5 * BLOCK_CHARS)))
    matched = [seen.match(RoutedPrompt(completion(each * 5 * BLOCK_CHARS))) for each in "abc"]
    assert matched == [5, 0, 5]
