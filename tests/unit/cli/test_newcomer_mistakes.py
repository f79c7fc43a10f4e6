"""Fifty mistakes of people who use the engine for the first time. Each message says what was found,
why it can't be used, and what to do next; the table has the words that a reader needs for that.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from engine.cli.commands import app
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

DEAD = "http://127.0.0.1:9"
# What is typed after `engine`, and the words.
COMMANDS: dict[str, tuple[str, ...]] = {
    "serev": ("No such command", "serve"),
    "serve --prot 80": ("No such option", "--port"),
    "serve --port 99999": ("--port", "65535", "99999"),
    "serve --port http": ("--port", "integer"),
    "serve --dtype int4": ("--dtype", "float32", "int4"),
    "serve --backend tourch": ("tourch", "torch"),
    "serve --host 0.0.0.0": ("other machines", "LLM_ENGINE_API_KEY", "--insecure-no-auth"),
    "serve --n-gpu-layers 99": ("--n-gpu-layers", "--device cuda"),
    "serve --trust-remote-code": ("no code of a model is ever run",),
    "serve --config nothing.toml": ("nothing.toml", "No such file"),
    "serve --config wrong.toml": ("prot", "port"),
    "run notes.txt hi --device cuda": ("cuda", "no driver", "--device out", "engine doctor"),
    "run m hi --temperature 3": ("--temperature", "2"),
    "show smollm2-135m-instrct": ("did you mean 'smollm2-135m-instruct'", "engine list"),
    "show models/smol.ggf": ("no file", "did you mean 'models/smol.gguf'"),
    "show qwen3-0.6b": ("not on this machine yet", "engine pull qwen3-0.6b"),
    "show notes.txt": ("notes.txt", "GGUF", "holds text", "engine list"),
    "show models/smol.gguf": ("truncated", "download", "again"),
    "show empty": ("empty", "no model", ".gguf"),
    "pull nothing": ("nothing", "catalogue", "engine list", "hf:ORG/REPO"),
    "pull qwen3-0.6b --quant Q9": ("no quant 'Q9'", "Q8_0"),
    "rm nothing --yes": ("no model called 'nothing'", "engine list"),
    "search zzzz": ("no such model", "engine pull ORG/REPO"),
    f"ps --url {DEAD}": ("Nothing answers", "Is the server running"),
    f"bench {DEAD}": ("Nothing answers", "engine serve"),
    f"top {DEAD} --once": ("Nothing answers", "engine serve"),
    f"conformance {DEAD}": ("Nothing answers", "engine serve"),
    "chat --url 127.0.0.1:8080": ("no address", "http://"),
    f"chat --url {DEAD}": ("Nothing answers", "engine serve"),
    "keys list": ("does not exist", "engine keys new"),
    "finetune": ("--base",),
    "finetune notes.txt --base m": ("model is called 'm'", "engine list"),
    "eval nothing.jsonl": ("nothing.jsonl", "No such file"),
    "convert notes.txt out.gguf": ("notes.txt", "holds text"),
}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
# Method, path and body of a request, and the words.
REQUESTS: dict[str, tuple[str, str, Any, tuple[str, ...]]] = {
    "no speech": ("POST", "/v1/audio/speech", {}, ("no speech", "/openapi.json")),
    "no images": ("POST", "/v1/images/generations", {}, ("no generation of images",)),
    "assistants": ("POST", "/v1/assistants", {}, ("/v1/responses",)),
    "near path": ("POST", "/v1/chat/completion", CHAT, ("did you mean /v1/chat/completions",)),
    "v1 twice": ("POST", "/v1/v1/chat/completions", CHAT, ("mean /v1/chat/completions",)),
    "no path": ("GET", "/nothing", None, ("/nothing", "/openapi.json")),
    "method": ("GET", "/v1/embeddings", None, ("GET", "POST")),
    "field": (
        "POST",
        "/v1/chat/completions",
        CHAT | {"max_token": 5},
        ("max_token", "Did you mean max_tokens"),
    ),
    "model": ("POST", "/v1/chat/completions", CHAT | {"model": "gpt-5"}, ("no such model", MODEL)),
    "no messages": ("POST", "/v1/chat/completions", {"model": MODEL}, ("messages", "required")),
    "text": ("POST", "/v1/chat/completions", CHAT | {"messages": "Hi"}, ("messages", "list")),
    "role": (
        "POST",
        "/v1/chat/completions",
        CHAT | {"messages": [{"role": "sytem", "content": "Hi"}]},
        ("role", "sytem", "system"),
    ),
    "hot": ("POST", "/v1/chat/completions", CHAT | {"temperature": 9}, ("temperature", "2", "9")),
    "zero": ("POST", "/v1/chat/completions", CHAT | {"max_tokens": 0}, ("max_tokens", "1")),
    "format": (
        "POST",
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "jsn"}},
        ("response_format", "json_schema"),
    ),
    "stream": ("POST", "/v1/chat/completions", CHAT | {"stream": "yes please"}, ("stream",)),
    "no JSON": ("POST", "/v1/chat/completions", "{'model': 1}", ("JSON",)),
    "form": ("POST", "/v1/chat/completions", "model=m", ("Content-Type", "application/json")),
}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that newcomers have, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    for variable in ("LLM_ENGINE_CONFIG", "LLM_ENGINE_API_KEY", "LLM_ENGINE_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("engine.backends.custom.engine_settings._has_gpu", lambda: False)
    monkeypatch.setattr("engine.backends.custom.engine_settings.OTHER_GPU_DEVICES", ())
    monkeypatch.setattr("engine.backends.custom.engine_settings.AMD_DEVICE", tmp_path / "kfd")
    monkeypatch.setattr("engine.finetuning.jobs._PACKAGES", ())
    Path("notes.txt").write_text("What I did on Monday.\n")
    Path("wrong.toml").write_text("[server]\nprot = 80\n")
    Path("empty").mkdir()
    Path("models").mkdir()
    Path("models/smol.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(6))


def test_there_are_fifty_mistakes() -> None:
    assert len(COMMANDS) + len(REQUESTS) >= 50


@pytest.mark.parametrize("typed", COMMANDS)
def test_a_mistaken_command_is_told_what_to_do(typed: str) -> None:
    result = CliRunner().invoke(app, typed.split())
    assert result.exit_code != 0
    assert "Traceback" not in result.stderr
    said = " ".join(result.stderr.split())
    assert [word for word in COMMANDS[typed] if word not in said] == [], said


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(make_settings(), FakeBackend(), Metrics(MODEL)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize("mistake", REQUESTS)
async def test_a_mistaken_request_is_told_what_to_do(
    client: httpx.AsyncClient, mistake: str
) -> None:
    method, path, body, words = REQUESTS[mistake]
    kind = "x-www-form-urlencoded" if mistake == "form" else "json"
    headers = {"content-type": f"application/{kind}"}
    content = {"content": body, "headers": headers} if isinstance(body, str) else {"json": body}
    reply = await client.request(method, path, **content)
    error = reply.json()["error"]
    assert 400 <= reply.status_code < 500
    assert error["code"] == error["code"].lower()
    said = error["message"]
    assert [word for word in words if word not in said] == [], said
