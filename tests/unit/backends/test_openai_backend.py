"""`OpenAIBackend` over sockets: what it survives, and what it lets go of."""

import asyncio
import base64
from pathlib import Path

import numpy as np
import pytest

from engine.backends.base import EventFeed
from engine.core.errors import (
    InvalidRequestError,
    NotFoundError,
    RateLimitError,
    RequestTimeoutError,
    UnavailableError,
)
from engine.core.interfaces.backend import EmbedRequest, FinishEvent, TextEvent, UsageEvent
from tests.support.fakes.openai_requests import (
    a_chat,
    a_completion,
    events_of,
    finishes_of,
    started,
    text_of,
    usage_of,
)
from tests.support.fakes.scripted_server import (
    ENDING,
    HELLO,
    Asked,
    Reply,
    delta,
    scripted_server,
    stream,
    until,
    usage,
    whole,
)

ANSWER = stream(*HELLO, *ENDING)


async def test_iterating_and_feeding_a_stream_give_the_same_events() -> None:
    async with scripted_server(ANSWER) as server, started(server.url) as backend:
        read = await events_of(backend.chat(a_chat()))
        fed: list = []
        feed = backend.chat(a_chat())
        assert isinstance(feed, EventFeed)
        await feed.feed(fed.append)
        assert read[:-1] == fed[:-1] and text_of(read) == "Hello"
        assert usage_of(fed).prompt_tokens == 3
        assert server.posts[0].headers["x-request-id"] == "request-1"


async def test_connections_are_kept_alive_and_serve_one_request_at_a_time() -> None:
    async with scripted_server(ANSWER) as server, started(server.url) as backend:
        for _ in range(5):
            await events_of(backend.chat(a_chat()))
        assert server.num_connections == 1
        await asyncio.gather(*(events_of(backend.chat(a_chat())) for _ in range(3)))
        assert server.num_connections == 3


async def test_a_keep_alive_connection_closed_by_the_server_is_replaced() -> None:
    """Closed by the server at the very moment at which it is used again."""

    def script(asked: Asked) -> Reply:
        return Reply([], closes=True) if len(server.posts) == 2 else ANSWER

    async with scripted_server(script) as server, started(server.url) as backend:
        await events_of(backend.chat(a_chat()))
        assert text_of(await events_of(backend.chat(a_chat()))) == "Hello"
        assert len(server.posts) == 3


async def test_a_server_on_a_unix_socket_is_reached(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    async with scripted_server(ANSWER, unix_path=path) as server, started(server.url) as backend:
        assert text_of(await events_of(backend.chat(a_chat()))) == "Hello"
        assert backend.models()[0].id == "scripted"


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(stream(*HELLO, delta(finish="stop"), usage(3, 2)), id="no [DONE]"),
        pytest.param(stream(*HELLO, *ENDING, hangs=True), id="nothing after [DONE]"),
        pytest.param(stream(*HELLO, *ENDING[:-1], closes=True), id="closed after its usage"),
        pytest.param(
            whole(
                {
                    "choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
                }
            ),
            id="whole, although a stream was asked for",
        ),
        pytest.param(
            Reply(
                [
                    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\n",
                    b"content-type: text/event-stream\r\n\r\n",
                    b'data: {"choices":[{"delta":{"content":"Hello"},"finish_reason":"stop"}],',
                    b'"usage":{"prompt_tokens":3,"completion_tokens":2}}\r\n\r\n',
                ],
                closes=True,
            ),
            id="ends with its connection",
        ),
    ],
)
async def test_streams_without_done_or_content_type_are_complete(reply: Reply) -> None:
    async with scripted_server(reply) as server, started(server.url) as backend:
        events = await events_of(backend.chat(a_chat()))
        assert text_of(events) == "Hello" and finishes_of(events) == [FinishEvent(0, "stop")]
        assert (usage_of(events).prompt_tokens, usage_of(events).completion_tokens) == (3, 2)


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(stream(*HELLO, closes=True), id="closed in the middle"),
        pytest.param(stream(*HELLO), id="an end without an ending"),
        pytest.param(stream(*HELLO, "[DONE]"), id="done without an ending"),
        pytest.param(stream(*HELLO, b"data: {\n\n"), id="no JSON"),
        pytest.param(stream(*HELLO, {"error": {"message": "secret path /x"}}), id="an error"),
        pytest.param(Reply([], closes=True), id="nothing at all"),
        pytest.param(Reply([b"SSH-2.0-nope\r\n"], hangs=True), id="no HTTP"),
        pytest.param(
            Reply([b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000], hangs=True), id="a big head"
        ),
        pytest.param(whole({"error": "overloaded"}, 503), id="503"),
        pytest.param(whole(b"<html>Bad gateway</html>", 502), id="502"),
        pytest.param(whole(b"not json"), id="a page"),
    ],
)
async def test_truncated_streams_are_retryable_errors(reply: Reply) -> None:
    async with scripted_server(reply) as server, started(server.url) as backend:
        with pytest.raises(UnavailableError) as caught:
            await events_of(backend.chat(a_chat()))
        assert caught.value.retryable
        assert "127.0.0.1" not in caught.value.message and "/x" not in caught.value.message


@pytest.mark.parametrize(
    "reply, kind, param",
    [
        (
            whole({"error": {"message": "bad", "param": "stop", "code": "x"}}, 400),
            InvalidRequestError,
            "stop",
        ),
        (whole({"detail": [{"msg": "bad"}]}, 422), InvalidRequestError, None),
        (whole({"error": {"message": "bad", "code": 404}}, 404), NotFoundError, None),
        (whole({"object": "error", "message": "bad"}, 400), InvalidRequestError, None),
        (whole({"error": "bad"}, 400), InvalidRequestError, None),
    ],
)
async def test_upstream_400_errors_keep_their_message_and_param(reply, kind, param) -> None:
    async with scripted_server(reply) as server, started(server.url) as backend:
        with pytest.raises(kind, match="bad") as caught:
            await events_of(backend.chat(a_chat()))
        assert caught.value.param == param and not caught.value.retryable
        assert backend.health().ready


async def test_an_upstream_429_passes_its_retry_after_on() -> None:
    reply = whole({"error": {"message": "slow down"}}, 429, retry_after="7")
    async with scripted_server(reply) as server, started(server.url) as backend:
        with pytest.raises(RateLimitError, match="slow down") as caught:
            await events_of(backend.chat(a_chat()))
        assert caught.value.retry_after == 7.0


async def test_an_upstream_context_overflow_has_the_usual_error_code() -> None:
    message = "This model's maximum context length is 8 tokens."
    reply = whole({"error": {"message": message, "code": 400}}, 400)
    async with scripted_server(reply) as server, started(server.url) as backend:
        with pytest.raises(InvalidRequestError) as caught:
            await events_of(backend.chat(a_chat()))
        assert caught.value.error_code == "context_length_exceeded"


@pytest.mark.parametrize("reply", [stream(*HELLO, hangs=True), Reply([], hangs=True)])
async def test_cancelling_a_request_closes_its_connection_at_once(reply: Reply) -> None:
    async with scripted_server(reply) as server, started(server.url) as backend:
        feeding = asyncio.create_task(backend.chat(a_chat()).feed(lambda event: None))
        await until(lambda: server.posts)
        feeding.cancel()
        await asyncio.wait_for(server.cut.wait(), 30)
        server.cut.clear()
        answer = backend.chat(a_chat())
        if len(reply.pieces):
            assert isinstance(await anext(answer), TextEvent)
            await answer.aclose()  # type: ignore[attr-defined]
            await asyncio.wait_for(server.cut.wait(), 30)


async def test_a_locally_matched_stop_string_cancels_the_upstream_request() -> None:
    reply = stream(*HELLO, delta(content="! STOP and more"), hangs=True)
    async with scripted_server(reply) as server, started(server.url) as backend:
        stops = ("1", "2", "3", "4", "STOP")
        events = await events_of(backend.chat(a_chat(params={"stop": stops})))
        assert text_of(events) == "Hello! "
        assert finishes_of(events) == [FinishEvent(0, "stop", "STOP")]
        assert usage_of(events).completion_tokens == 3
        await asyncio.wait_for(server.cut.wait(), 30)
        assert server.posts[0].body["stop"] == ["1", "2", "3", "4"]


async def test_an_upstream_stream_that_is_idle_too_long_is_an_error() -> None:
    reply, limit = stream(*HELLO, hangs=True), {"idle_timeout_s": 0.05}
    async with scripted_server(reply) as server, started(server.url, **limit) as backend:
        with pytest.raises(UnavailableError, match="sent nothing for 0.05 seconds"):
            await events_of(backend.chat(a_chat()))


async def test_an_upstream_request_has_its_own_deadline() -> None:
    reply = stream(*HELLO, hangs=True)
    async with scripted_server(reply) as server, started(server.url) as backend:
        with pytest.raises(RequestTimeoutError, match="0.05 seconds"):
            await events_of(backend.chat(a_chat(timeout_s=0.05)))
        await asyncio.wait_for(server.cut.wait(), 30)


async def test_stopping_the_backend_ends_every_stream() -> None:
    async with scripted_server(stream(*HELLO, hangs=True)) as server:
        async with started(server.url) as backend:
            reading = asyncio.create_task(events_of(backend.chat(a_chat())))
            await until(lambda: server.posts)
            await backend.stop()
            with pytest.raises(UnavailableError):
                await reading
            await backend.stop()
            assert not backend.health().ready
        with pytest.raises(UnavailableError):
            await events_of(backend.chat(a_chat()))


async def test_n_choices_are_emulated_by_several_requests() -> None:
    def script(asked: Asked) -> Reply:
        assert "n" not in asked.body
        text = f"seed {asked.body['seed']}"
        return stream(delta(content=text), delta(finish="stop"), usage(3, 2), "[DONE]")

    async with scripted_server(script) as server:
        async with started(server.url, lacks=("n",)) as backend:
            assert "n" in backend.models()[0].emulated
            events = await events_of(backend.chat(a_chat(params={"n": 3, "seed": 5})))
            assert sorted(text_of(events, i) for i in range(3)) == ["seed 5", "seed 6", "seed 7"]
            assert len(finishes_of(events)) == 3
            assert sum(isinstance(event, UsageEvent) for event in events) == 1
            assert usage_of(events).prompt_tokens == 3
            assert usage_of(events).completion_tokens == 6
        ids = {each.headers["x-request-id"] for each in server.posts}
        assert len(ids) == 3


async def test_one_failed_choice_fails_the_whole_request() -> None:
    def script(asked: Asked) -> Reply:
        is_last = asked.body["seed"] == 1
        return whole({"error": "x"}, 500) if is_last else stream(*HELLO, hangs=True)

    async with scripted_server(script) as server, started(server.url, lacks=("n",)) as backend:
        with pytest.raises(UnavailableError):
            await events_of(backend.chat(a_chat(params={"n": 2, "seed": 0})))
        await asyncio.wait_for(server.cut.wait(), 30)


async def test_echo_is_emulated_without_the_server() -> None:
    reply = stream({"choices": [{"text": " c", "finish_reason": "length"}]}, usage(2, 1), "[DONE]")
    async with scripted_server(reply) as server, started(server.url) as backend:
        events = await events_of(backend.complete(a_completion("a b", echo=True)))
        assert text_of(events) == "a b c" and "echo" not in server.posts[0].body
        assert isinstance(events[0], TextEvent) and events[0].num_tokens == 0


async def test_a_completion_without_max_tokens_asks_for_the_remaining_context() -> None:
    def script(asked: Asked) -> Reply:
        if asked.path == "/tokenize":
            return whole({"tokens": [1, 2, 3]})
        assert asked.body["max_tokens"] == 2045
        return ANSWER

    async with scripted_server(script) as server:
        async with started(server.url, dialect="vllm") as backend:
            await events_of(backend.complete(a_completion(params={"max_tokens": None})))
        async with started(server.url, dialect="openai") as backend:
            with pytest.raises(InvalidRequestError, match="max_tokens is needed"):
                await events_of(backend.complete(a_completion(params={"max_tokens": None})))


@pytest.mark.parametrize("as_text", [True, False])
async def test_embeddings_are_read_from_base64_or_lists_in_index_order(as_text: bool) -> None:
    rows = np.array([[0.0, 2.0], [3.0, 4.0]], np.float32)

    def script(asked: Asked) -> Reply:
        assert asked.body["encoding_format"] == "base64"
        values = [base64.b64encode(r.tobytes()).decode() if as_text else r.tolist() for r in rows]
        data = [{"index": i, "embedding": values[i]} for i in (1, 0)]
        return whole({"data": data, "usage": {"prompt_tokens": 4}})

    async with scripted_server(script) as server, started(server.url) as backend:
        made = await backend.embed(EmbedRequest(request_id="e", inputs=("a", "b")))
        assert made.prompt_tokens == 4
        np.testing.assert_allclose(made.vectors, [[0, 1], [0.6, 0.8]], rtol=1e-6)
        with pytest.raises(UnavailableError, match="other vectors"):
            await backend.embed(EmbedRequest(request_id="e", inputs=("a",)))
