"""What `engine serve` tells its user, around a server that is not started."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from engine.cli.main import app


@pytest.fixture(autouse=True)
def _no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def build(settings: Any, process: Any) -> SimpleNamespace:
        model_id = settings.model.model_path
        return SimpleNamespace(app=None, loading=model_id, first_model_id=lambda: model_id)

    def run(app: Any, sock: Any, on_ready: Callable[[float], None], say: Any) -> None:
        sock.close()
        on_ready(0.1)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLM_ENGINE_API_KEY", raising=False)
    monkeypatch.setattr("engine.cli.serve.EngineProcess", SimpleNamespace)
    monkeypatch.setattr("engine.cli.serve.BEGAN_AT", time.monotonic() - 9.0)
    monkeypatch.setattr("engine.cli.serve._begin", lambda settings, process: None)
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


def test_the_first_request_can_be_pasted() -> None:
    lines = serve().stderr.splitlines()
    assert lines[0] == "Loading m[1] ..."
    assert seconds_until_ready(lines[1]) >= 9.0
    assert json.loads(lines[2].split(" -d ")[1].strip("'"))["model"] == "m[1]"
    assert "Authorization" not in lines[2]


def test_the_first_request_has_a_key_where_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_ENGINE_API_KEY", "s" * 20)
    assert "-H 'Authorization: Bearer KEY'" in serve().stderr
    assert "s" * 20 not in serve().stderr


def test_a_json_log_is_nothing_but_json_lines() -> None:
    messages = [
        json.loads(line)["message"] for line in serve("--log-format", "json").stderr.splitlines()
    ]
    assert messages[0] == "Loading m[1] ..."
    assert seconds_until_ready(messages[1]) >= 9.0
