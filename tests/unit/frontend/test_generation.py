"""A request's deltas to its events: whose they are, what is counted, how it ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from engine.core.errors import EngineError, InferenceError, RequestTimeoutError, UnavailableError
from engine.core.interfaces.backend import (
    FinishEvent,
    TextEvent,
    TokenText,
    TopLogprob,
    UsageEvent,
)
from engine.core.interfaces.request import (
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from engine.frontend import generation as generation_module
from engine.frontend.generation import MAX_BACKLOG, Generation
from engine.frontend.prompts import Prepared
from tests.support.fakes.stub_engine import ToldEngine
from tests.support.toy_engine.backend import TEXT  # token 0 is "a", token 1 is "b"

PLAIN = Prepared((0, 1, 2), "prompt", continuation=True)


def opened(told: ToldEngine | None = None, prepared: Prepared = PLAIN, **params) -> Generation:
    request = GenerateRequest(
        request_id="r",
        prompt=prepared.token_ids,
        params=SamplingParams(**{"max_tokens": 99} | params),
        eos_ids=(23,),
    )
    return Generation(request, TEXT, prepared, told or ToldEngine())


async def read(generation: Generation, *deltas: TokenDelta | EngineError) -> list:
    for delta in deltas:
        generation.deliver(delta)

    async def collect() -> list:
        return [event async for event in generation]

    return await at_once(collect())


async def at_once(work: Coroutine) -> Any:
    """All that it needs is there: it fails when it waits for more."""
    task = asyncio.create_task(work)
    for _ in range(100):
        await asyncio.sleep(0)
        if task.done():
            return await task
    task.cancel()
    raise AssertionError("it waits for what never comes")


def text_of(events: list, choice: int) -> str:
    return "".join(e.text for e in events if isinstance(e, TextEvent) and e.choice == choice)


async def test_each_choice_has_its_own_text_and_its_own_end():
    events = await read(
        opened(n=3),
        TokenDelta("r", 2, (4,)),
        TokenDelta("r", 0, (0,)),
        TokenDelta("r", 1, (1, 2)),
        TokenDelta("r", 0, (3,), finish_reason="length"),
        TokenDelta("r", 2, (5,), finish_reason="length"),
        TokenDelta("r", 1, (6,), finish_reason="stop"),
    )
    assert [text_of(events, choice) for choice in range(3)] == ["ad", "bcg", "ef"]
    ends = [event for event in events if isinstance(event, FinishEvent)]
    assert ends == [FinishEvent(0, "length"), FinishEvent(2, "length"), FinishEvent(1, "stop")]
    assert isinstance(events[-1], UsageEvent) and events.count(events[-1]) == 1


async def test_usage_counts_all_choices_and_the_first_tokens_times(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(generation_module.time, "monotonic", lambda: now[0])
    generation = opened(n=2)
    events = generation
    generation.deliver(TokenDelta("r", 0, (0,), num_cached=32, queue_s=0.25, prefill_s=0.5))
    await anext(events)
    now[0] = 103.0
    generation.deliver(TokenDelta("r", 1, (0, 1, 2), num_cached=48, queue_s=7.0, prefill_s=8.0))
    generation.deliver(TokenDelta("r", 1, (), finish_reason="length"))
    generation.deliver(TokenDelta("r", 0, (2,), finish_reason="length"))
    *_, usage = [event async for event in events]
    assert usage == UsageEvent(
        prompt_tokens=3,
        completion_tokens=5,
        cached_tokens=32,
        queue_s=0.25,
        prefill_s=0.5,
        decode_s=3.0,
        reasoning_tokens=0,
    )


async def test_an_answer_without_tokens_has_no_decode_time():
    *_, usage = await read(opened(), TokenDelta("r", 0, (), finish_reason="length"))
    assert (usage.completion_tokens, usage.decode_s) == (0, 0.0)


async def test_logprob_tokens_are_rendered_as_text():
    score = TokenLogprobs(-0.5, (1, 2), (-0.25, -1.5))
    first, *_ = await read(opened(logprobs=2), TokenDelta("r", 0, (0,), (score,), "length"))
    alternatives = (TopLogprob("b", b"b", -0.25, 1), TopLogprob("c", b"c", -1.5, 2))
    token = TokenText("a", b"a", -0.5, alternatives, token_id=0)
    assert first == TextEvent(0, "a", 1, (token,), (0,))


@pytest.mark.parametrize(
    ("stop_id", "shown", "reason"), [(5, "ab", 5), (23, "ab", None), (None, "abf", None)]
)
async def test_a_stop_token_is_not_text_and_is_reported_only_if_the_client_named_it(
    stop_id, shown, reason
):
    """5 was named by the client, 23 is the model's own end."""
    ids = (1, 5 if stop_id is None else stop_id)
    events = await read(
        opened(stop_token_ids=(5,)),
        TokenDelta("r", 0, (0,)),
        TokenDelta("r", 0, ids, finish_reason="stop", stop_token_id=stop_id),
    )
    assert text_of(events, 0) == shown
    assert events[-2] == FinishEvent(0, "stop", reason)
    assert events[-1].completion_tokens == 3


@pytest.mark.parametrize(
    ("item", "kind", "message"),
    [
        (
            TokenDelta("r", 0, finish_reason="error", error_code="timeout", error_message="late"),
            RequestTimeoutError,
            "late",
        ),
        (TokenDelta("r", 0, finish_reason="error"), InferenceError, "failed"),
        (TokenDelta("r", 0, finish_reason="abort"), InferenceError, "aborted"),
        (UnavailableError("gone"), UnavailableError, "gone"),
    ],
    ids=["late", "unnamed", "abort", "engine"],
)
@pytest.mark.parametrize("fed", [False, True])
async def test_engine_errors_raise_their_type_and_abort_the_other_choices(item, kind, message, fed):
    told = ToldEngine()
    generation = opened(told, n=2)
    generation.deliver(TokenDelta("r", 0, (0,)))
    generation.deliver(item)
    with pytest.raises(kind, match=message):
        if fed:
            await at_once(generation.feed(lambda event: None))
        else:
            await read(generation)
    assert told.forgotten == [None]


async def test_only_closing_a_stream_early_aborts_the_request():
    told = ToldEngine()
    generation = opened(told)
    generation.deliver(TokenDelta("r", 0, (0,)))
    events = generation
    await anext(events)
    await events.aclose()
    assert told.forgotten == [None]
    told = ToldEngine()
    await read(opened(told), TokenDelta("r", 0, (0,), finish_reason="length"))
    assert told.forgotten == []


async def test_a_stop_string_aborts_only_its_own_choice():
    told = ToldEngine()
    events = await read(
        opened(told, n=2, stop=("cd",)),
        TokenDelta("r", 1, (1,)),
        TokenDelta("r", 1, (2, 3, 4)),
        TokenDelta("r", 1, (5,), finish_reason="length"),
        TokenDelta("r", 0, (6,), finish_reason="length"),
    )
    assert told.forgotten == [1]
    assert (text_of(events, 0), text_of(events, 1)) == ("g", "b")
    assert FinishEvent(1, "stop", "cd") in events and FinishEvent(0, "length") in events


async def test_a_stop_string_in_the_last_delta_sends_no_abort():
    told = ToldEngine()
    last = TokenDelta("r", 0, (2, 3), finish_reason="length")
    events = await read(opened(told, stop=("cd",)), TokenDelta("r", 0, (1,)), last)
    assert told.forgotten == [] and events[-2] == FinishEvent(0, "stop", "cd")


async def test_text_held_back_for_a_stop_string_is_emitted_at_the_end():
    events = await read(opened(stop=("bcx",)), TokenDelta("r", 0, (0, 1, 2), None, "length"))
    assert text_of(events, 0) == "abc"


async def test_a_slow_reader_gets_its_backlog_as_one_event():
    """The oldest is merged until few wait; then each comes alone again."""
    many = MAX_BACKLOG + 6
    generation = opened(logprobs=0)
    for index in range(many):
        delta = TokenDelta(
            "r", 0, (index,), (TokenLogprobs(-float(index)),), num_cached=16 if index == 0 else 0
        )
        generation.deliver(delta)
    last = TokenDelta("r", 0, (23,), (TokenLogprobs(-23.0),), "stop", stop_token_id=23)
    events = await read(generation, last)
    texts = [event for event in events if isinstance(event, TextEvent)]
    assert [event.num_tokens for event in texts] == [many - MAX_BACKLOG + 1] + [1] * MAX_BACKLOG
    assert [token for event in texts for token in event.token_ids] == [*range(many), 23]
    scores = [each.logprob for event in texts for each in event.logprobs]
    assert scores == [-float(token) for token in [*range(many), 23]]
    assert text_of(events, 0) == "".join(chr(ord("a") + token) for token in range(many))
    assert (events[-1].cached_tokens, events[-1].completion_tokens) == (16, many + 1)


@pytest.mark.parametrize(("stop", "counts"), [((), [3, 1]), (("x",), [1, 1, 1, 1])])
async def test_deltas_of_several_steps_that_arrive_together_are_one_event(stop, counts):
    """Not if a stop string may end the text between them."""
    generation, events = opened(stop=stop), []
    feeding = asyncio.create_task(generation.feed(events.append))
    await asyncio.sleep(0)
    generation.deliver(*(TokenDelta("r", 0, (token,)) for token in range(3)))
    generation.deliver(TokenDelta("r", 0, (3,), finish_reason="length"))
    await feeding
    assert [each.num_tokens for each in events if isinstance(each, TextEvent)] == counts
    assert text_of(events, 0) == "abcd"


async def test_merging_deltas_keeps_the_stop_token():
    """The end is merged too where more deltas of another choice wait behind it."""
    generation = opened(n=2, stop_token_ids=(5,))
    generation.deliver(TokenDelta("r", 0, (0,)))
    generation.deliver(TokenDelta("r", 0, (1, 5), finish_reason="stop", stop_token_id=5))
    for index in range(MAX_BACKLOG + 2):
        generation.deliver(TokenDelta("r", 1, (index,)))
    events = await read(generation, TokenDelta("r", 1, (0,), finish_reason="length"))
    assert text_of(events, 0) == "ab"
    (finish,) = [each for each in events if isinstance(each, FinishEvent) and each.choice == 0]
    assert (finish.reason, finish.stop_reason) == ("stop", 5)


async def test_deltas_are_merged_per_choice_up_to_its_end():
    generation = opened(n=2)
    for index in range(MAX_BACKLOG + 4):
        generation.deliver(TokenDelta("r", index % 2, (index,)))
    generation.deliver(TokenDelta("r", 0, (0,), finish_reason="length"))
    for index in range(MAX_BACKLOG + 4):
        generation.deliver(TokenDelta("r", 1, (index,)))
    events = await read(generation, TokenDelta("r", 1, (0,), finish_reason="length"))
    assert text_of(events, 0) == "acegik" + "a"
    assert text_of(events, 1) == "bdfhjl" + "abcdefghijkl" + "a"
    assert [event for event in events if isinstance(event, FinishEvent)] == [
        *(FinishEvent(0, "length"), FinishEvent(1, "length")),
    ]


async def test_an_exception_in_an_event_callback_ends_only_its_request():
    told = ToldEngine()
    generation = opened(told)

    def sink(event) -> None:
        raise ZeroDivisionError

    feeding = asyncio.create_task(generation.feed(sink))
    await asyncio.sleep(0)
    generation.deliver(TokenDelta("r", 0, (0,)))  # does not raise: it is the link's call
    generation.deliver(TokenDelta("r", 0, (1,)))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(feeding, 60)
    assert told.forgotten == [None]


async def test_an_echoed_prompt_precedes_each_choices_text():
    prepared = Prepared((0, 1, 2), "prompt", continuation=True, echo="abc")
    events = await read(
        opened(prepared=prepared, n=2),
        TokenDelta("r", 1, (3,)),
        TokenDelta("r", 1, (4,), finish_reason="length"),
        TokenDelta("r", 0, (5,), finish_reason="length"),
    )
    assert (text_of(events, 0), text_of(events, 1)) == ("abcf", "abcde")
    assert events[0] == TextEvent(1, "abc", 0, None)
    assert events[-1].completion_tokens == 3
