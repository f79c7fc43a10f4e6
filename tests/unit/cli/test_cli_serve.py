"""What `engine serve` tells its user, around a server that is not started."""

import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from typer.testing import CliRunner, Result

from engine.backends.custom.app import Server
from engine.cli.commands import app
from engine.cli.serve import parse_options
from engine.core.text.builtin_templates import BUILTIN_TEMPLATES


@pytest.fixture(autouse=True)
def _no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def build(settings: Any, process: Any, reread: Any) -> SimpleNamespace:
        model_id = settings.model.model_path
        call = "/v1/embeddings", {"model": model_id, "input": "Hello!"}
        return SimpleNamespace(app=None, loading=model_id, first_call=lambda: call)

    def run(app: Any, sock: Any, on_ready: Callable[[float], None], say: Any, probes: Any) -> None:
        sock.close()
        on_ready(0.1)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLM_ENGINE_API_KEY", raising=False)
    process = SimpleNamespace(discard=lambda: None)
    monkeypatch.setattr("engine.cli.serve.take_engine", lambda: process)
    monkeypatch.setattr("engine.cli.serve.BEGAN_AT", time.monotonic() - 9.0)
    monkeypatch.setattr("engine.cli.serve.begin_engine", lambda *arguments: None)
    monkeypatch.setattr("engine.backends.custom.app.build_server", build)
    monkeypatch.setattr("engine.servers.run.run_server", run)
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def serve(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["serve", "m[1]", "--port", "0", *arguments])
    assert result.exit_code == 0, result.output
    return result


def seconds_until_ready(line: str) -> float:
    """Since the command began, not since the server began to wait for the model."""
    told = re.match(r"Ready in (\d+\.\d) s at http://127\.0\.0\.1:", line)
    assert told, line
    return float(told[1])


def test_serve_prints_a_curl_command_for_the_first_request() -> None:
    lines = serve().stderr.splitlines()
    assert lines[0] == "Loading m[1] ..."
    assert seconds_until_ready(lines[1]) >= 9.0
    assert re.search(r" curl http://127\.0\.0\.1:\d+/v1/embeddings -H ", lines[2])
    assert json.loads(lines[2].split(" -d ")[1].strip("'"))["model"] == "m[1]"
    assert "Authorization" not in lines[2]


@pytest.mark.parametrize(
    ("can", "path"),
    [
        (("completions", "chat"), "/v1/chat/completions"),
        (("completions",), "/v1/completions"),
        (("embeddings",), "/v1/embeddings"),
    ],
)
def test_the_printed_curl_command_uses_an_endpoint_of_the_model(
    can: tuple[str, ...], path: str
) -> None:
    backend = SimpleNamespace(models=lambda: [SimpleNamespace(id="m", capabilities=can)])
    application = SimpleNamespace(state=SimpleNamespace(services=SimpleNamespace(backend=backend)))
    server = Server(cast(FastAPI, application), "m", "m")
    assert server.first_call()[0] == path
    assert server.first_call()[1]["model"] == "m"


def test_the_printed_curl_command_has_a_placeholder_for_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLM_ENGINE_API_KEY", "s" * 20)
    assert "-H 'Authorization: Bearer KEY'" in serve().stderr
    assert "s" * 20 not in serve().stderr


@pytest.mark.parametrize(("bound", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]")])
def test_the_printed_address_is_localhost_when_listening_on_all_interfaces(
    bound: str, shown: str
) -> None:
    from engine.core.listening import address_of, is_on_all_interfaces

    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((bound, 0))
        assert address_of(sock).startswith(f"http://{shown}:") and is_on_all_interfaces(sock)


def test_a_json_log_is_nothing_but_json_lines() -> None:
    messages = [
        json.loads(line)["message"] for line in serve("--log-format", "json").stderr.splitlines()
    ]
    assert messages[0] == "Loading m[1] ..."
    assert seconds_until_ready(messages[1]) >= 9.0


def test_option_values_are_parsed_as_toml_or_text() -> None:
    given = [
        "python=/opt/bin/python",
        "max_model_len=2048",
        "eager=true",
        "tags=['a', 'b']",
        "s=a=b",
    ]
    assert parse_options(given) == {
        "python": "/opt/bin/python",
        "max_model_len": 2048,
        "eager": True,
        "tags": ["a", "b"],
        "s": "a=b",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--option", "python"], "--option python: write it as NAME=VALUE"),
        (["--option", "api_key=abc"], "api_key looks like a secret"),
        (["--config", "two.toml"], "model.model_path (MODEL): two.toml has [backends.*]"),
    ],
)
def test_contradictory_serve_arguments_are_refused_before_the_start(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "two.toml").write_text("[backends.a]\nkind = 'native'\n")
    result = CliRunner().invoke(app, ["serve", "m", "--port", "0", *arguments])
    assert result.exit_code == 2 and words in result.stderr


def test_engine_settings_that_a_backend_ignores_are_refused() -> None:
    told = serve("--backend", "other", "--threads", "2", "--strict").stderr
    assert "performance.threads (--threads) is for engines of our own" in told
    assert "server.strict" not in told
    assert "for engines of our own" not in serve("--backend", "native", "--threads", "2").stderr


@pytest.mark.parametrize(
    ("flags", "setting", "value"),
    [
        (("--max-model-len", "512"), "model.max_sequence_length", 512),
        (("-c", "512"), "model.max_sequence_length", 512),
        (("--served-model-name", "x"), "model.name", "x"),
        (("--max-num-seqs", "3"), "performance.batch_size", 3),
        (("-np", "3"), "performance.batch_size", 3),
        (("--max-num-batched-tokens", "999"), "performance.max_batch_tokens", 999),
        (("--no-enable-prefix-caching",), "cache.enabled", False),
        (("--kv-cache-dtype", "int8"), "cache.kv_dtype", "int8"),
        (("-t", "2"), "performance.threads", 2),
    ],
)
def test_flags_named_as_in_vllm_and_llama_cpp_set_our_settings(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], setting: str, value: Any
) -> None:
    section, _, key = setting.partition(".")
    seen: list[Any] = []
    build = sys.modules["engine.backends.custom.app"].build_server

    def watched(settings: Any, process: Any, reread: Any) -> Any:
        seen.append(getattr(getattr(settings, section), key))
        return build(settings, process, reread)

    monkeypatch.setattr("engine.backends.custom.app.build_server", watched)
    serve(*flags)
    assert seen == [value]


def test_flags_of_sampling_set_the_preset_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    build = sys.modules["engine.backends.custom.app"].build_server

    def watched(settings: Any, process: Any, reread: Any) -> Any:
        seen.extend([settings.tables.presets["x"], reread().tables.presets["x"]])
        return build(settings, process, reread)

    monkeypatch.setattr("engine.backends.custom.app.build_server", watched)
    words = ("--temp", "0.5", "-n", "7", "--seed", "3", "--chat-template", "chatml")
    serve("--alias", "x", *words)
    for preset in seen:
        told = preset.parameters.model_dump(exclude_none=True)
        assert told == {"temperature": 0.5, "max_tokens": 7, "seed": 3}
        assert preset.template == BUILTIN_TEMPLATES["chatml"]
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--tensor-split", "2,1"), "--tensor-parallel-size"),
        (("-ngl=99",), "--device cuda or --device cpu"),
        (("--trust-remote-code",), "leave it out"),
        (("m", "-m", "n"), "name one model, not m and n"),
        (("m", "-hf", "o/r:Q8_0"), "name one model, not m and o/r:Q8_0"),
    ],
)
def test_unsupported_flags_of_other_engines_are_answered_with_advice(
    arguments: tuple[str, ...], told: str
) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2 and told in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_api_key_on_the_command_line_is_used_and_not_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLM_ENGINE_API_KEY", "t" * 20)  # restored after the test
    shown = serve("--api-key", "s" * 20).stderr
    assert "-H 'Authorization: Bearer KEY'" in shown and "s" * 20 not in shown
    assert os.environ["LLM_ENGINE_API_KEY"] == "s" * 20 and "prefer --api-key-file" in shown


def test_missing_models_are_pulled_by_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[str] = []
    monkeypatch.setattr(
        "engine.core.store.model_store.needs_pull", lambda model: model == "o/r:Q8_0"
    )
    monkeypatch.setattr("engine.cli.pull_progress.pull_shown", pulled.append)
    result = CliRunner().invoke(app, ["serve", "-hf", "o/r:Q8_0", "--port", "0"])
    assert result.exit_code == 0 and pulled == ["o/r:Q8_0"]
    assert not serve().exit_code and pulled == ["o/r:Q8_0"]
