"""A backend's streams over the toy engine: what is released, when, and what is counted."""

import asyncio

import msgspec
import pytest

from engine.backends.base import BackendConfig, InterruptedRequest
from engine.backends.custom.base_custom import CustomBackend
from engine.core.errors import (
    CacheError,
    ConfigError,
    EngineError,
    InvalidRequestError,
    UnavailableError,
)
from engine.core.interfaces.backend import (
    CompletionRequest,
    EmbedRequest,
    FinishEvent,
    GenerationContext,
    UsageEvent,
)
from engine.core.interfaces.request import ControlReply, GenerateRequest, SamplingParams, TokenDelta
from engine.frontend.generation import MAX_BACKLOG, Generation
from engine.frontend.prompts import Prepared
from tests.support.fakes.scripted_link import Bench
from tests.support.fakes.stub_engine import ToldEngine
from tests.support.toy_engine.backend import TEXT, ToyBackend
from tests.support.toy_engine.runner import VOCAB


class BareBackend(CustomBackend):
    framework = "toy"


async def started(**settings) -> ToyBackend:
    backend = ToyBackend(**settings)
    await backend.start()
    return backend


def asking(name: str = "r", **params) -> CompletionRequest:
    params = SamplingParams(**{"max_tokens": 200, "temperature": 0.0, "seed": 1} | params)
    context = GenerationContext(request_id=name, params=params)
    return CompletionRequest(context=context, prompt=(1, 2, 3))


def of_choice(events: list, choice: int) -> list:
    return [event for event in events if getattr(event, "choice", None) == choice]


async def test_closing_a_stream_early_releases_it_before_close_returns():
    backend = await started()
    sent, send = [], backend._link._client.send
    backend._link._client.send = lambda message: sent.append(message) or send(message)
    events = backend.complete(asking())
    await anext(events)
    await events.aclose()
    assert not backend._link._requests
    assert [type(message).__name__ for message in sent] == ["GenerateRequest", "Abort"]
    await backend.stop()


async def test_events_fed_to_a_callback_equal_events_that_are_iterated():
    backend = await started()
    read = [event async for event in backend.complete(asking("read", n=2, max_tokens=20))]
    fed = []
    await backend.complete(asking("fed", n=2, max_tokens=20)).feed(fed.append)
    assert of_choice(fed, 1) == of_choice(read, 1)
    assert isinstance(fed[-1], UsageEvent) and fed[-1].completion_tokens == 40
    assert not backend._link._requests
    await backend.stop()


async def test_a_feed_calls_back_synchronously_on_delivery():
    request = GenerateRequest(request_id="r", prompt=(1,), params=SamplingParams(max_tokens=3))
    generation = Generation(request, TEXT, Prepared((1,), "prompt"), ToldEngine())
    fed = []
    generation.deliver(TokenDelta("r", 0, (1,)))  # before anybody feeds
    feeding = asyncio.create_task(generation.feed(fed.append))
    await asyncio.sleep(0)
    assert [event.text for event in fed] == ["b"]
    generation.deliver(TokenDelta("r", 0, (2,)))
    assert [event.text for event in fed] == ["b", "c"]
    generation.deliver(TokenDelta("r", 0, (3,), finish_reason="length"))
    await asyncio.wait_for(feeding, 30)
    assert [type(event).__name__ for event in fed[2:]] == [
        *("TextEvent", "FinishEvent", "UsageEvent"),
    ]


async def test_cancelling_a_feed_aborts_its_request():
    backend = await started()
    sent, send = [], backend._link._client.send
    backend._link._client.send = lambda message: sent.append(message) or send(message)
    begun = asyncio.Event()
    feeding = asyncio.create_task(backend.complete(asking()).feed(lambda event: begun.set()))
    await begun.wait()
    feeding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await feeding
    assert not backend._link._requests
    assert [type(message).__name__ for message in sent] == ["GenerateRequest", "Abort"]
    await backend.stop()


async def test_a_feed_raises_the_error_that_ended_its_request():
    backend = await started()
    begun = asyncio.Event()
    feeding = asyncio.create_task(backend.complete(asking()).feed(lambda event: begun.set()))
    await begun.wait()
    await backend.stop()
    with pytest.raises(UnavailableError):
        await feeding


async def test_a_request_cancelled_while_tokenizing_is_never_submitted(monkeypatch):
    backend = await started()
    counts = []

    def encode(*_: object, **__: object) -> list[int]:
        counts.append(backend.num_open)
        return [1, 2, 3]

    monkeypatch.setattr(TEXT.tokenizer, "encode_prompt", encode, raising=False)
    words = msgspec.structs.replace(asking(), prompt="a b c")
    reading = asyncio.create_task(anext(backend.complete(words)))
    await asyncio.sleep(0)  # it has reached the tokenizer's thread
    assert backend.num_open == 1
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    while backend.num_open:
        await asyncio.sleep(0.001)
    assert not backend._link._requests
    assert counts == [1]  # before the engine has it
    await backend.stop()


async def test_a_stopped_backend_refuses_requests_and_can_be_stopped_again():
    backend = await started()
    events = backend.complete(asking())
    await anext(events)
    await backend.stop()
    with pytest.raises(UnavailableError):
        async for _ in events:
            pass
    with pytest.raises(UnavailableError, match="stopped"):
        await anext(backend.complete(asking("again")))
    await backend.stop()


@pytest.mark.seconds
async def test_a_start_that_fails_leaves_no_task_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyBackend, "worker_module", "tests.support.toy_engine.worker")
    monkeypatch.setattr("engine.ipc.connection.STOP_GRACE_S", 0.1)
    (tmp_path / "slow.gguf").write_bytes(b"GGUF, but not really")  # refused while the engine loads
    backend = BareBackend(str(tmp_path / "slow.gguf"))
    with pytest.raises(EngineError):
        await backend.start()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_flush_that_failed_is_an_error_of_the_cache(monkeypatch):
    backend = await started()
    assert await backend.flush_prefixes() == ("0 blocks freed",)

    async def fails() -> ControlReply:
        return ControlReply(1, False, "the tier is gone")

    monkeypatch.setattr(backend._link, "flush_cache", fails)
    with pytest.raises(CacheError, match="the tier is gone"):
        await backend.flush_prefixes()
    await backend.stop()


def test_backend_arguments_are_checked_by_name_and_type():
    config = BackendConfig(model_name="m", backend_args={"max_slots": 3})
    assert BareBackend(config)._options.max_slots == 3
    with pytest.raises(ConfigError, match="max_slot'.*max_slots"):
        BareBackend(BackendConfig(model_name="m", backend_args={"max_slot": 3}))
    with pytest.raises(ConfigError, match="max_slots"):
        BareBackend(BackendConfig(model_name="m", backend_args={"max_slots": "many"}))


@pytest.mark.parametrize("backlog", [1, MAX_BACKLOG + 20])
async def test_tokens_after_a_stop_string_are_not_counted(backlog):
    params = SamplingParams(max_tokens=100, stop=("cd",), logprobs=None)
    engine = ToldEngine()
    generation = Generation(
        GenerateRequest(request_id="r", prompt=(1,), params=params),
        TEXT,
        Prepared((1,), "prompt", continuation=True),
        engine,
    )
    tokens = [0, 1, 2, 3] + [4] * 40  # "abcd", then what the engine had on its way
    for token in tokens[:backlog]:
        generation.deliver(TokenDelta("r", 0, (token,)))
    seen = []
    async for event in generation:
        seen.append(event)
        if tokens[backlog:]:
            generation.deliver(TokenDelta("r", 0, (tokens[backlog],)))
            backlog += 1
    assert "".join(event.text for event in seen[:-2]) == "ab"
    assert seen[-2] == FinishEvent(0, "stop", "cd")
    assert isinstance(seen[-1], UsageEvent) and seen[-1].completion_tokens == 4
    assert engine.forgotten == [0]


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("prompt", {"prompt": (1, VOCAB)}),
        ("prompt", {"prompt": ()}),
        ("prompt", {"max_tokens": 10_000}),
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("stop_token_ids", {"stop_token_ids": (-1,)}),
    ],
)
async def test_an_engine_error_names_the_clients_field(param, changes):
    backend = await started()
    prompt = changes.pop("prompt", (1, 2))
    request = msgspec.structs.replace(asking(**changes), prompt=prompt)
    with pytest.raises(InvalidRequestError) as caught:
        await anext(backend.complete(request))
    assert caught.value.param == param
    await backend.stop()


async def test_more_inputs_than_the_queue_holds_are_embedded():
    backend = await started(max_queued=2)
    inputs = tuple((1, 2, token) for token in range(20))
    embedded = await backend.embed(EmbedRequest(request_id="r", inputs=inputs))
    assert embedded.vectors.shape == (20, VOCAB)
    assert not backend._link._requests
    await backend.stop()


async def test_requests_move_only_to_a_backend_with_the_same_fingerprint():
    """Threads do not change a result. Another model, arithmetic or context may."""
    interrupted: list[InterruptedRequest] = []
    bench = Bench(0.1, max_revivals=8)
    home = ToyBackend(in_process=False)
    home._link, home.on_interrupted = bench.link, interrupted.append
    await bench.start()
    bench.submit()
    (opened,) = bench.link._requests._requests.values()
    home._move(opened)
    assert [each.request_id for each in interrupted] == ["r"]
    for changes, can_move in (
        ({"threads": 7}, True),
        ({"kv_dtype": "int8"}, False),
        ({"numerics": "fast"}, False),
        ({"max_revivals": 0}, False),
    ):
        other, peer = Bench(max_revivals=changes.get("max_revivals", 8)), home.remade(None, changes)
        peer._link = other.link
        assert not peer.take_over(interrupted[0]), "it is not up yet"
        await other.start()
        assert peer.take_over(interrupted[0]) is can_move and bool(other.client.sent) is can_move
        assert (home.hand_over(peer) is not None) is can_move
        await other.link.stop()
    await bench.link.stop()
