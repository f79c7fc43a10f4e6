"""What `OpenAIBackend` finds out about a server, before it is asked and while it is."""

import contextlib

import pytest

from engine.backends.openai import OpenAIBackend, OpenAIConfig, link
from engine.core.errors import (
    ConfigError,
    EngineError,
    ModelError,
    UnavailableError,
)
from tests.support.fakes.openai_requests import (
    a_chat,
    events_of,
    started,
    text_of,
)
from tests.support.fakes.scripted_server import (
    ENDING,
    HELLO,
    MODELS,
    Asked,
    Reply,
    scripted_server,
    stream,
    until,
    whole,
)

ANSWER = stream(*HELLO, *ENDING)


async def test_health_follows_failed_requests_and_recovers_by_probes() -> None:
    async with scripted_server(ANSWER) as server:
        port = int(server.url.split(":")[2].split("/")[0])
        backend = OpenAIBackend(
            OpenAIConfig(base_url=server.url, dialect="openai", probe_interval_s=0.05)
        )
        await backend.start()
        assert backend.health().ready
    with pytest.raises(UnavailableError):
        await events_of(backend.chat(a_chat()))
    assert not backend.health().ready and "refused" in backend.health().detail
    async with scripted_server(ANSWER, port=port):
        await until(lambda: backend.health().ready)
        assert text_of(await events_of(backend.chat(a_chat()))) == "Hello"
    await backend.stop()


async def test_an_upstream_server_that_is_gone_is_noticed_by_probes() -> None:
    async with scripted_server(ANSWER) as server:
        backend = OpenAIBackend(
            OpenAIConfig(base_url=server.url, dialect="openai", probe_interval_s=0.02)
        )
        await backend.start()
    await until(lambda: not backend.health().ready)
    await backend.stop()


async def test_a_busy_server_that_answers_no_probe_is_not_marked_dead(monkeypatch) -> None:
    """It answers no probe, while an answer comes from it; then that ends, and nothing comes."""
    monkeypatch.setattr(link, "PROBE_TIMEOUT_S", 0.1)
    probes: list[Asked] = []

    def models(asked: Asked) -> Reply:
        probes.append(asked)
        return whole(MODELS) if len(probes) == 1 else Reply([], hangs=True)

    reply = stream(*HELLO, *[b": at work\n\n"] * 60, *ENDING, pause_s=0.01)
    async with scripted_server(reply) as server:
        server.paths["/v1/models"] = models
        async with started(server.url, probe_interval_s=0.01) as backend:
            await events_of(backend.chat(a_chat()))
            assert len(probes) > 3 and backend.health().ready
            await until(lambda: not backend.health().ready)


@pytest.mark.parametrize(
    "path, body, dialect",
    [
        ("/v1/capabilities", {"engine": {}, "models": [{"id": "scripted"}]}, "engine"),
        ("/get_model_info", {"model_path": "x"}, "sglang"),
        ("/props", {"default_generation_settings": {"n_ctx": 512}}, "llama-server"),
        ("/info", {"max_total_tokens": 1024}, "tgi"),
        ("/api/version", {"version": "0.12"}, "ollama"),
        ("/version", {"version": "0.32"}, "vllm"),
        ("/nothing", {}, "openai"),
    ],
)
async def test_the_dialect_of_an_upstream_server_is_recognized(
    path: str, body: dict, dialect: str
) -> None:
    async with scripted_server(whole({"error": "no"}, 404)) as server:
        server.paths[path] = lambda asked: whole(body)
        async with started(server.url, dialect="auto", model_name="auto") as backend:
            (card,) = backend.models()
            assert (card.backend, card.id, card.max_model_len) == (dialect, "scripted", 2048)
            assert "embeddings" not in card.capabilities


async def test_capabilities_are_discovered_from_the_upstream_server() -> None:
    listed = {"data": [{"id": "llama:latest"}]}
    shown = {"capabilities": ["completion", "tools", "thinking"]}
    async with scripted_server(whole({"error": "no"}, 404)) as server:
        server.paths["/v1/models"] = lambda asked: whole(listed)
        server.paths["/api/show"] = lambda asked: whole(shown)
        async with started(server.url, dialect="ollama", model_name="llama") as backend:
            (card,) = backend.models()
        assert card.id == "llama:latest" and {"logit_bias", "priority"} <= set(card.lacks)
        assert {"tools", "reasoning", "chat"} <= set(card.capabilities)
        assert card.template_options == ("reasoning_effort",)
        template: dict = {"default_generation_settings": {"n_ctx": 512}}
        template["chat_template"] = "{% if enable_thinking %}"
        template["chat_template_caps"] = {"supports_tools": False}
        server.paths["/props"] = lambda asked: whole(template)
        async with started(server.url, dialect="llama-server") as backend:
            (card,) = backend.models()
        assert "chat" in card.capabilities and "tools" not in card.capabilities
        server.paths["/v1/embeddings"] = lambda asked: whole({"data": [{"embedding": [1, 2, 3]}]})
        async with started(server.url, dialect="llama-server") as backend:
            (card,) = backend.models()
        assert (card.max_model_len, card.num_dimensions) == (512, 3)
        assert card.template_options == ("enable_thinking",)
        assert card.capabilities == ("embeddings",)
        own = {"max_model_len": 99, "capabilities": ("chat",), "template_options": ("thinking",)}
        async with started(server.url, **own) as backend:
            (card,) = backend.models()
        assert (card.max_model_len, card.capabilities) == (99, ("chat",))
        assert "thinking" in card.template_options


@pytest.mark.parametrize(
    "fields, paths, kind, words",
    [
        ({"model_name": "gpt-9"}, {}, ConfigError, "no model 'gpt-9'; it has: scripted"),
        ({}, {"/v1/models": whole({}, 401)}, ConfigError, "refuses the key"),
        ({}, {"/v1/models": whole(b"<html>", 200)}, ConfigError, "is base_url right"),
        ({}, {"/v1/models": whole({"data": []})}, ConfigError, "lists no model"),
        ({}, {"/v1/models": whole({}, 404)}, ConfigError, "lists no model"),
        ({"start_timeout_s": 0.3}, {"/v1/models": whole({}, 503)}, ModelError, "status 503"),
        ({"capabilities": ("flying",)}, {}, ConfigError, "'flying' is none"),
        ({"lacks": ("flying",)}, {}, ConfigError, "'flying' is no parameter"),
    ],
)
async def test_misconfigured_upstream_servers_are_refused_at_start(
    fields, paths, kind, words
) -> None:
    async with scripted_server(ANSWER) as server:
        server.paths |= {path: (lambda asked, r=reply: r) for path, reply in paths.items()}
        with pytest.raises(kind, match=words):
            async with started(server.url, **fields):
                pass


async def test_an_unreachable_upstream_server_is_reported() -> None:
    with pytest.raises(ModelError, match="refused the connection. Is it running"):
        async with started("http://127.0.0.1:9/v1", start_timeout_s=0.3):
            pass
    backend = OpenAIBackend(OpenAIConfig(base_url="http://127.0.0.1:9/v1"))
    assert not backend.health().ready and backend.models() == []
    with pytest.raises(UnavailableError):
        await events_of(backend.chat(a_chat()))
    await backend.stop()


async def test_an_upstream_server_that_is_still_loading_is_waited_for() -> None:
    answers = iter([whole({}, 503), whole({}, 503), whole(MODELS)])
    async with scripted_server(ANSWER) as server:
        server.paths["/v1/models"] = lambda asked: next(answers)
        async with started(server.url) as backend:
            assert backend.health().ready


async def test_no_connection_is_left_open_but_idle_keep_alive_ones() -> None:
    """After every kind of ending, no connection is left but those that wait for the next."""
    replies = iter([ANSWER, whole({"error": "x"}, 400), stream(*HELLO, closes=True), ANSWER])
    async with scripted_server(lambda asked: next(replies)) as server:
        async with started(server.url) as backend:
            for _ in range(4):
                with contextlib.suppress(EngineError):
                    await events_of(backend.chat(a_chat()))
            await until(lambda: len(server.writers) <= 2)  # of requests, and of a probe
        await until(lambda: not server.writers)
