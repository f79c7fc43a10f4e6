"""What a request becomes on its way to the engine: every field, every limit, every vector."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from engine.backends.base import check_context, check_input
from engine.core.errors import EngineError, InvalidRequestError, RateLimitError
from engine.core.interfaces.backend import (
    CompletionRequest,
    EmbedRequest,
    GenerationContext,
    GrammarSpec,
)
from engine.core.interfaces.request import Deltas, GenerateRequest, SamplingParams, TokenDelta
from engine.core.sandbox.liveness import Vitals
from engine.frontend import embedding
from engine.frontend.embedding import vectors_of
from engine.frontend.engine_link import EngineLink
from tests.support.toy_engine.backend import TEXT, ToyBackend
from tests.support.toy_engine.runner import VOCAB

PARAMS = SamplingParams(max_tokens=3, temperature=0.5, seed=5, n=2, stop_token_ids=(7,))
CONTEXT = GenerationContext(
    request_id="r",
    params=PARAMS,
    model="toy",
    session="session",
    priority=-3,
    salt="salt",
    tenant="tenant",
    timeout_s=30.5,
    queue_timeout_s=10.25,
)
NAMED = ("model", "session")  # they choose a backend, and end there


async def started(**text) -> ToyBackend:
    backend = ToyBackend()
    await backend.start()
    backend._text = replace(TEXT, **text)
    return backend


def sent_by(backend: ToyBackend) -> list:
    """What the engine is sent from here on."""
    sent, send = [], backend._link._client.send
    backend._link._client.send = lambda message: sent.append(message) or send(message)
    return sent


async def drain(events) -> list:
    return [event async for event in events]


async def test_every_field_of_a_request_reaches_the_engine():
    tokenizer = SimpleNamespace(**vars(TEXT.tokenizer) | {"eos_ids": (9, 4)})
    backend = await started(tokenizer=tokenizer)
    sent = sent_by(backend)
    await drain(backend.complete(CompletionRequest(context=CONTEXT, prompt=(1, 2, 3))))
    expected = GenerateRequest(
        request_id="r",
        prompt=(1, 2, 3),
        params=PARAMS,
        eos_ids=(4, 9),
        priority=-3,
        salt="salt",
        tenant="tenant",
        timeout_s=30.5,
        queue_timeout_s=10.25,
    )
    assert sent == [expected]
    # What is left at its default above was not forgotten: a new field has to be placed here.
    forms = {
        "bad_words",
        "dry_breakers",
        "grammar",
        "images",
        "interp",
        "notes",
        "on_captured",
        "on_progress",
        "on_prompt",
        "on_wait",
        "pools",
        "reports_progress",
        "resumed",
        "second_start",
        "tells_begin",
        "truncate_prompt_tokens",
        "truncation_side",
        *NAMED,
    }
    asked, passed = set(GenerationContext.__struct_fields__), set(expected.__struct_fields__)
    by_engine = {*("adapter", "eos_ids", "prompt", "handover", "keeps_blocks")}
    assert asked - forms <= passed and passed - forms - asked == by_engine
    await backend.stop()


async def test_a_grammar_reaches_the_engine_and_an_invalid_one_names_its_field():
    backend = await started()
    checked = []

    async def check(source: str, param: str) -> None:
        checked.append((source, param))
        raise InvalidRequestError("no", param=param)

    backend._preparer._checker.check = check
    spec = GrammarSpec(kind="regex", source="[ab]+", param="guided_regex")
    context = msgspec.structs.replace(CONTEXT, grammar=spec)
    sent = sent_by(backend)
    with pytest.raises(InvalidRequestError) as refused:
        await drain(backend.complete(CompletionRequest(context=context, prompt=(1,))))
    assert refused.value.param == "guided_regex" and not sent
    ((source, _),) = checked
    backend._preparer._checker.check = lambda source, param: asyncio.sleep(0)
    await backend._link.stop()
    backend = await started()
    backend._preparer._checker.check = lambda source, param: asyncio.sleep(0)
    sent = []
    backend._link._client.send = sent.append
    reading = asyncio.create_task(
        anext(backend.complete(CompletionRequest(context=context, prompt=(1,))))
    )
    while not sent:
        await asyncio.sleep(0.001)
    reading.cancel()
    assert sent[0].grammar == source
    await asyncio.gather(reading, return_exceptions=True)
    backend._link._client = None
    await backend.stop()


async def test_every_field_of_an_embedding_reaches_the_engine():
    backend = await started()
    sent = sent_by(backend)
    request = EmbedRequest(
        request_id="e",
        model="toy",
        inputs=((1, 2), (3,)),
        priority=4,
        salt="salt",
        tenant="tenant",
        timeout_s=30.5,
        queue_timeout_s=10.25,
    )
    found = await backend.embed(request)
    common = {
        "params": SamplingParams(max_tokens=1),
        "priority": 4,
        "salt": "salt",
        "tenant": "tenant",
        "timeout_s": 30.5,
        "pools": True,
    }
    assert sent == [
        GenerateRequest(request_id="e-0", prompt=(1, 2), queue_timeout_s=10.25, **common),
        GenerateRequest(request_id="e-1", prompt=(3,), **common),
    ]
    asked = set(EmbedRequest.__struct_fields__) - {
        "model",
        "inputs",
        "prompt_names",
        "truncate_prompt_tokens",
    }
    assert asked <= set(GenerateRequest.__struct_fields__)
    assert found.prompt_tokens == 3 and not backend._link._requests
    np.testing.assert_allclose(np.linalg.norm(found.vectors, axis=1), 1.0, rtol=1e-5)
    alone = await backend.embed(EmbedRequest(request_id="alone", inputs=((3,),)))
    np.testing.assert_allclose(found.vectors[1], alone.vectors[0])
    await backend.stop()


@pytest.mark.parametrize(
    ("limit", "length", "expected"), [(4, 6, 4), (-1, 300, 256), (None, 6, 6), (9, 6, 6)]
)
async def test_embedding_inputs_are_truncated_only_as_requested(limit, length, expected):
    backend = await started()
    prompt = tuple(index % VOCAB // 2 for index in range(length))
    request = EmbedRequest(request_id="e", inputs=(prompt,), truncate_prompt_tokens=limit)
    sent = sent_by(backend)
    found = await backend.embed(request)
    assert found.prompt_tokens == expected and sent[0].prompt == prompt[-expected:]
    await backend.stop()


async def test_inputs_that_are_too_long_empty_or_unknown_are_refused_by_name():
    backend = await started()
    one = (((1,) * 257,), ((VOCAB,),), ((-1,),))
    for inputs in (*one, ((1, 2), ()), ((1, 2), (1,) * 257)):
        with pytest.raises(InvalidRequestError) as refused:
            await backend.embed(EmbedRequest(request_id="e", inputs=inputs))
        assert refused.value.param == ("input" if len(inputs) == 1 else "input[1]")
    whole = await backend.embed(EmbedRequest(request_id="e", inputs=((1,) * 256,)))
    assert whole.prompt_tokens == 256
    await backend.stop()


@pytest.mark.parametrize(
    ("prompt", "asked", "fits"),
    [(6, 4, True), (6, 5, False), (9, None, True), (10, None, False), (10, 0, False), (7, 3, True)],
)
def test_prompt_and_max_tokens_must_fit_the_context(prompt, asked, fits):
    if fits:
        check_context(prompt, asked, 10, "messages")
        return
    with pytest.raises(InvalidRequestError, match="maximum context length is 10") as refused:
        check_context(prompt, asked, 10, "messages")
    assert (refused.value.param, refused.value.error_code) == (
        "messages",
        "context_length_exceeded",
    )
    assert f"{prompt} in the prompt, {asked or 0} in the completion" in refused.value.message


def test_an_embedding_input_may_fill_the_context():
    check_input(10, 10, "input[2]")
    with pytest.raises(InvalidRequestError, match="11 tokens"):
        check_input(11, 10, "input[2]")


@pytest.mark.parametrize(("max_tokens", "room"), [(3, 3), (None, 1)])
async def test_a_prompt_is_truncated_before_its_length_is_checked(max_tokens, room):
    backend = await started()
    sent = sent_by(backend)
    params = msgspec.structs.replace(PARAMS, max_tokens=max_tokens)
    context = msgspec.structs.replace(CONTEXT, params=params, truncate_prompt_tokens=-1)
    prompt = tuple(index % 20 for index in range(400))
    await drain(backend.complete(CompletionRequest(context=context, prompt=prompt)))
    assert sent[0].prompt == prompt[-(256 - room) :]
    await backend.stop()


def test_truncation_of_an_encoder_input_keeps_its_first_tokens_and_the_last():
    prompt = (1, 2, 3, 4, 9)
    encoder = replace(TEXT, config=SimpleNamespace(encoder=object()))
    assert encoder.cut_prompt(prompt, 3) == (1, 2, 9)
    assert encoder.cut_prompt(prompt, 5) == prompt
    assert TEXT.cut_prompt(prompt, 3) == (3, 4, 9)


async def test_health_combines_the_links_state_and_the_heartbeat():
    backend = await started()
    client = backend._link._client
    client.vitals = lambda: Vitals(2.5, 10.0, 0.1)
    backend._link.num_restarts = 4
    health = backend.health()
    assert (health.ready, health.detail) == (True, "ready")
    assert (health.step_age_s, health.num_restarts) == (2.5, 4)
    client.vitals = lambda: Vitals(20.5, 10.0, 0.1)
    health = backend.health()
    assert not health.ready and "no progress" in health.detail
    client.vitals = lambda: None
    backend._text = None
    health = backend.health()
    assert not health.ready and "tokenizer is loading" in health.detail
    await backend.stop()
    assert not backend.health().ready


class ScriptedLink(EngineLink):
    """Answers each request by a rule, in the order that the test wants."""

    def __init__(self) -> None:
        self.open: dict = {}
        self.most_open = 0
        self.forgotten: list = []

    def submit(self, request, receiver) -> None:
        self.open[request.request_id] = receiver
        self.most_open = max(self.most_open, len(self.open))

    def forget(self, request_id, choice) -> None:
        self.forgotten.append((request_id, choice))

    def done(self, request_id) -> None:
        self.open.pop(request_id, None)


def pooling(count: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(request_id=f"{i}", prompt=(i,), params=SamplingParams(), pools=True)
        for i in range(count)
    ]


async def submitted(link: ScriptedLink, count: int) -> None:
    for _ in range(100):
        await asyncio.sleep(0)
        if len(link.open) == count:
            return
    raise AssertionError(f"{len(link.open)} of {count} were submitted")


async def test_embeddings_are_returned_in_input_order():
    link = ScriptedLink()
    embedding_all = asyncio.create_task(vectors_of(link, pooling(3), 10, 2))
    await submitted(link, 3)
    for index in (2, 0, 1):
        vector = np.array([3 * (index + 1), 4], np.float32)
        link.open[str(index)].deliver(TokenDelta(str(index), 0, vector=vector.tobytes()))
        await asyncio.sleep(0)
    rows = await embedding_all
    expected = np.array([[3, 4], [6, 4], [9, 4]], np.float32)
    np.testing.assert_allclose(rows, expected / np.linalg.norm(expected, axis=1, keepdims=True))
    assert link.forgotten == []


async def test_embedding_requests_in_flight_are_bounded_by_the_queue(monkeypatch):
    for max_queued, limit, most in ((2, 128, 2), (50, 3, 3)):
        monkeypatch.setattr(embedding, "MAX_IN_FLIGHT", limit)
        link = ScriptedLink()
        working = asyncio.create_task(vectors_of(link, pooling(7), max_queued, 1))
        while not working.done():
            for name, receiver in list(link.open.items()):
                receiver.deliver(TokenDelta(name, 0, vector=np.ones(1, np.float32).tobytes()))
            await asyncio.sleep(0)
        assert link.most_open == most


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (RateLimitError("full"), RateLimitError),
        (TokenDelta("1", 0, finish_reason="error", error_code="timeout"), EngineError),
        (TokenDelta("1", 0, finish_reason="abort"), EngineError),
    ],
)
async def test_the_first_failed_embedding_aborts_the_others(item, kind):
    link = ScriptedLink()
    working = asyncio.create_task(vectors_of(link, pooling(3), 10, 1))
    await submitted(link, 3)
    link.open["1"].deliver(item)
    with pytest.raises(kind):
        await working
    assert not link.open and sorted(link.forgotten) == [(str(i), None) for i in range(3)]


async def test_embedding_no_inputs_gives_an_empty_matrix():
    assert (await vectors_of(ScriptedLink(), [], 10, 7)).shape == (0, 7)


async def test_a_zero_embedding_is_not_normalized():
    link = ScriptedLink()
    working = asyncio.create_task(vectors_of(link, pooling(1), 10, 2))
    await submitted(link, 1)
    link.open["0"].deliver(TokenDelta("0", 0, vector=np.zeros(2, np.float32).tobytes()))
    assert (await working).tolist() == [[0.0, 0.0]]


async def test_deltas_of_one_step_reach_every_request():
    backend = await started()
    read = asyncio.gather(
        *(
            drain(
                backend.complete(
                    CompletionRequest(
                        context=msgspec.structs.replace(
                            CONTEXT, request_id=f"r{i}", params=SamplingParams(max_tokens=i + 1)
                        ),
                        prompt=(i,),
                    )
                )
            )
            for i in range(4)
        )
    )
    counts = [events[-1].completion_tokens for events in await read]
    assert counts == [1, 2, 3, 4]
    backend._link._on_message(Deltas((TokenDelta("nobody", 0, (1,)),)))
    await backend.stop()
