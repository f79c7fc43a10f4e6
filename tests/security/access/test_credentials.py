"""Secrets go to whom they are for: never into a command line, a log, an answer or a metric (SEC-28;
T6).

Hub tokens and redirects are in tests/unit/core/store/test_pull.py, keys of servers behind ours in
test_upstream_keys.py.
"""

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.backends.sglang import SGLangConfig
from engine.backends.vllm import VLLMConfig
from engine.core.config import load_settings
from engine.core.errors import ConfigError
from engine.core.key_file import add_key
from engine.core.observability.logging import setup_logging
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat, make_settings

API, ADMIN, TOKEN = "api-secret-0123456789", "admin-secret-0123456789", "token-secret-0123456789"
HUB, REDIS = "hf_hubsecret0123456789", "redis-secret-0123456789"
SECRETS = (API, ADMIN, TOKEN, HUB, REDIS)
REDIS_URL = f"redis://user:{REDIS}@127.0.0.1:1/0"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    setup_logging("debug", "json", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_command_lines_of_child_processes_contain_no_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", HUB)
    monkeypatch.setenv("CHILD_KEY", API)
    monkeypatch.setenv("LLM_ENGINE_API_KEY", API)
    vllm = VLLMConfig(model_name="org/model", api_key_env="CHILD_KEY", env={"EXTRA": "x"})
    sglang = SGLangConfig(model_name="org/model")
    for config in (vllm, sglang):
        words = " ".join(config.argv())
        assert not any(secret in words for secret in SECRETS)
        assert not any(name.startswith("LLM_ENGINE_") for name in config.environment())
    assert vllm.environment()["VLLM_API_KEY"] == API


@pytest.mark.parametrize(
    "key", ["server.api_key", "server.admin_key", "metrics.token", "limits.redis_url"]
)
def test_secrets_in_a_config_file_are_refused(tmp_path: Path, key: str) -> None:
    section, name = key.split(".")
    file = tmp_path / "engine.toml"
    file.write_text(f'[{section}]\n{name} = "{API}"\n')
    with pytest.raises(ConfigError) as raised:
        load_settings(file)
    assert API not in str(raised.value)


async def test_no_response_log_or_metric_contains_a_secret(
    tmp_path: Path, log: io.StringIO
) -> None:
    file = tmp_path / "keys.json"
    named, _ = add_key(file, "alice", limits={"requests_per_minute": 3})
    server = {"api_key": API, "admin_key": ADMIN, "keys_file": file}
    settings = make_settings(
        server=server,
        metrics={"token": TOKEN},
        limits={"redis_url": REDIS_URL, "auth_failures_per_minute": 3},
        storage={"path": tmp_path / "data"},
    )
    metrics = Metrics(MODEL)
    app = create_app(settings, FakeBackend(), metrics)
    answers = []
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for key in (API, ADMIN, TOKEN, named, "wrong-" + API):
            headers = {"authorization": f"Bearer {key}"}
            for path in (
                *("/health", "/metrics", "/v1/models", "/openapi.json", "/v1/capabilities"),
                *(f"/v1/admin/{each}" for each in ("status", "keys", "audit", "models", "routes")),
            ):
                answers.append((await client.get(path, headers=headers)).text)
            for body in (chat(), chat(temperature=9), chat(user=key)):
                answers.append(
                    (await client.post("/v1/chat/completions", json=body, headers=headers)).text
                )
    told = "\n".join([*answers, log.getvalue(), metrics.render()[0].decode(), repr(settings)])
    for secret in (*SECRETS, named):
        assert secret not in told
