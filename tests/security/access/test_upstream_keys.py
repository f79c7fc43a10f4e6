"""Keys of servers behind ours: named by a configuration, never in it, in a log or in an answer
(SEC-28; T6).
"""

import logging
from pathlib import Path

import pytest

from engine.backends.factory import make_backend
from engine.backends.openai import OpenAIBackend, OpenAIConfig
from engine.backends.openai.config import parse_endpoint, request_headers
from engine.core.errors import ConfigError, UnavailableError
from tests.support.fakes.openai_requests import a_chat
from tests.support.fakes.scripted_server import ENDING, HELLO, scripted_server, stream, whole

SECRET = "sk-very-secret-0123456789"


def test_an_upstream_key_comes_from_an_environment_variable_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    for config in (
        OpenAIConfig(base_url="http://h/v1", api_key_env="K"),
        OpenAIConfig(base_url="http://h/v1", api_key_file=str(file)),
    ):
        assert f"authorization: Bearer {SECRET}" in request_headers(config, {"K": f" {SECRET} "})
        assert SECRET not in repr(config)
    other = OpenAIConfig(base_url="http://h/v1", api_key_env="K", api_key_header="api-key")
    assert f"api-key: {SECRET}" in request_headers(other, {"K": SECRET})


@pytest.mark.parametrize(
    "fields, environ, words",
    [
        ({"api_key_env": "K"}, {}, "K holds no key"),
        ({"api_key_env": "K"}, {"K": f"{SECRET}\r\nX-Evil: 1"}, "can be no key"),
        ({"api_key_file": "/does/not/exist"}, {}, "can't be read"),
        ({"api_key_env": "K", "api_key_file": "f"}, {"K": SECRET}, "one of them"),
        ({"headers": {"Authorization": f"Bearer {SECRET}"}}, {}, "api_key_env"),
        ({"headers": {"X-Api-Key": SECRET}}, {}, "api_key_env"),
        ({"headers": {"X-Fine": "a\r\nX-Evil: 1"}}, {}, "printable"),
        ({"headers": {"Host": "elsewhere"}}, {}, "can't be set"),
        ({"headers": {"bad name": "x"}}, {}, "can't be set"),
    ],
)
def test_unusable_upstream_keys_and_headers_are_refused(fields, environ, words) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        request_headers(OpenAIConfig(base_url="http://h/v1", **fields), environ)
    assert SECRET not in str(caught.value)


def test_a_key_in_a_base_url_is_refused_and_not_echoed() -> None:
    with pytest.raises(ConfigError, match="api_key_env") as caught:
        parse_endpoint(f"http://user:{SECRET}@host/v1")
    assert SECRET not in str(caught.value)


def test_an_upstream_key_cannot_be_given_as_an_option() -> None:
    with pytest.raises(ConfigError, match="no option 'api_key'; did you mean api_key_env"):
        make_backend("openai", "m", {"base_url": "http://h/v1", "api_key": SECRET})


async def test_an_upstream_key_is_sent_and_never_logged_or_echoed(caplog, monkeypatch) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("UPSTREAM_KEY", SECRET)
    refusal = whole({"error": {"message": f"Incorrect API key: {SECRET[:4]}***"}}, 401)
    async with scripted_server(refusal) as server:
        config = OpenAIConfig(base_url=server.url, dialect="openai", api_key_env="UPSTREAM_KEY")
        backend = OpenAIBackend(config)
        await backend.start()
        with pytest.raises(UnavailableError) as caught:
            await anext(backend.chat(a_chat()))
        assert server.posts[0].headers["authorization"] == f"Bearer {SECRET}"
        assert not backend.health().ready
        # The client must not take it for its own key, nor see what the other server said of it.
        assert caught.value.status == 503 and "sk-" not in caught.value.message
        assert "refuses our key" in caplog.text and SECRET not in caplog.text
        await backend.stop()


async def test_redirects_do_not_carry_the_upstream_key_to_another_server(monkeypatch) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", SECRET)
    async with scripted_server(stream(*HELLO, *ENDING)) as other:
        moved = whole(b"", 307, location=f"{other.url}/chat/completions")
        async with scripted_server(moved) as server:
            config = OpenAIConfig(base_url=server.url, dialect="openai", api_key_env="UPSTREAM_KEY")
            backend = OpenAIBackend(config)
            await backend.start()
            with pytest.raises(UnavailableError):
                await anext(backend.chat(a_chat()))
            assert not other.asked
            await backend.stop()
