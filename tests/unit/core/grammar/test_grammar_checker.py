"""The child that compiles grammars: what it answers, what it survives, and what is kept of it."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator

import pytest

from engine.core.errors import InvalidRequestError, RateLimitError, UnavailableError
from engine.core.grammar import checker as checker_module
from engine.core.grammar.checker import MAX_VERDICTS, GrammarChecker
from engine.core.grammar.spec import grammar_text
from engine.core.interfaces.backend import GrammarSpec

pytestmark = pytest.mark.seconds  # each checker has a process


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    await checker.close()


def lark(text: str) -> str:
    return grammar_text(GrammarSpec(kind="grammar", source=text))


GOOD = 'start: "a" | "b"'
# Whether all of these patterns can match at once takes a number of states that doubles with each.
SLOW = {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(1, 20)]}


SLOW_SPEC = GrammarSpec(kind="json_schema", source=json.dumps(SLOW))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_valid_grammar_passes_and_an_invalid_one_is_a_client_error(
    checker: GrammarChecker,
) -> None:
    assert checker.child_pid is None, "nothing is started before the first check"
    await checker.check(lark(GOOD), "guided_grammar")
    with pytest.raises(InvalidRequestError) as caught:
        await checker.check(lark("start: missing"), "guided_grammar")
    assert caught.value.param == "guided_grammar"
    assert caught.value.message.startswith("guided_grammar: the grammar cannot be used: ")
    assert "\n" not in caught.value.message


async def test_a_grammar_that_matches_nothing_is_refused(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidRequestError, match="admits no text at all"):
        await checker.check(lark("start: /[^\\s\\S]/"), "it")


async def test_a_slow_grammar_is_killed_and_the_next_check_works(checker: GrammarChecker) -> None:
    await checker.check(lark(GOOD), "it")
    first = checker.child_pid
    assert first is not None
    for _ in range(2):  # the second answer comes from the cache
        with pytest.raises(InvalidRequestError, match="takes too long to compile; simplify it"):
            await checker.check(grammar_text(SLOW_SPEC), "it")
    assert not is_running(first)
    while checker.child_pid in (None, first):  # another one starts without being asked
        await asyncio.sleep(0.01)
    second = checker.child_pid
    await checker.check(lark('start: "c"'), "it")
    assert checker.child_pid == second


async def test_a_dying_checker_process_fails_only_one_grammar(checker: GrammarChecker) -> None:
    await checker.check(lark(GOOD), "it")
    assert checker.child_pid is not None
    os.kill(checker.child_pid, 11)  # as a stack overflow in the library does
    with pytest.raises(InvalidRequestError, match="too much memory or nesting"):
        await checker.check(lark('start: "c"'), "it")
    await checker.check(lark('start: "d"'), "it")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_killed_or_stopped_child_does_not_count_against_the_grammar(
    checker: GrammarChecker, sent: signal.Signals
) -> None:
    await checker.check(lark(GOOD), "it")
    assert checker.child_pid is not None
    os.kill(checker.child_pid, sent)
    await checker.check(lark('start: "c"'), "it")


async def test_a_checker_process_stopped_repeatedly_gives_no_verdict(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "COMPILE_TIMEOUT_S", 0.0)
    with pytest.raises(UnavailableError, match="try later"):
        await checker.check(lark(GOOD), "it")
    assert checker.num_verdicts == 0
    monkeypatch.undo()
    await checker.check(lark(GOOD), "it")


async def test_the_same_grammar_is_checked_once(checker: GrammarChecker) -> None:
    await asyncio.gather(*(checker.check(lark(GOOD), "it") for _ in range(200)))
    assert checker.num_verdicts == 1


async def test_the_number_of_waiting_grammar_checks_is_bounded(checker: GrammarChecker) -> None:
    checks = [checker.check(lark(f'start: "{n}"'), "it") for n in range(200)]
    results = await asyncio.gather(*checks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, RateLimitError)]
    assert len(refused) == 200 - checker_module.MAX_WAITING
    assert all(result is None for result in results if result not in refused)


async def test_a_cancelled_caller_does_not_stop_the_grammar_check(checker: GrammarChecker) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await checker.check(lark(GOOD), "it")
    await checker.check(lark(GOOD), "it")
    assert checker.num_verdicts == 1


async def test_cached_grammar_verdicts_are_bounded(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "MAX_VERDICTS", 3)
    assert MAX_VERDICTS > 3
    for n in range(6):
        await checker.check(lark(f'start: "{n}"'), "it")
    assert checker.num_verdicts == 3


async def test_the_least_recently_used_grammar_verdict_is_evicted(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "MAX_VERDICTS", 2)
    compiled: list[str] = []
    ask = checker._ask

    async def note(grammar: str) -> str | None:
        compiled.append(grammar)
        return await ask(grammar)

    monkeypatch.setattr(checker, "_ask", note)
    one, two, three = (lark(f'start: "{n}"') for n in range(3))
    for grammar in (one, two, one, three, one):
        await checker.check(grammar, "it")
    assert compiled == [one, two, three]


async def test_close_ends_the_checker_process(checker: GrammarChecker) -> None:
    await checker.check(lark(GOOD), "it")
    pid = checker.child_pid
    assert pid is not None
    waiting = asyncio.create_task(checker.check(grammar_text(SLOW_SPEC), "it"))
    while not checker._turn.locked():
        await asyncio.sleep(0)
    await checker.close()
    assert not is_running(pid)
    with pytest.raises(asyncio.CancelledError):
        await waiting
