"""`engine backends argv`: what would be started, for people who want to see or change it."""

import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.cli.commands import app

CONFIG = f"""
[backends.fast]
kind = "native"
model = "smollm2-135m-instruct"
[backends.big]
kind = "vllm"
model = "owner/big"
python = "{sys.executable}"
max_model_len = 2048
backend_args = {{ max-logprobs = 5 }}
[backends.other]
kind = "sglang"
model = "owner/other"
[models.m]
backends = ["fast", "big", "other"]
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "engine.toml"
    path.write_text(CONFIG)
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["backends", "argv", *arguments])


def test_argv_prints_every_external_engine_of_a_config_file(config: str) -> None:
    lines = run("--config", config).stdout.splitlines()
    assert [lines[0], lines[2]] == ["# big", "# other"]
    words = shlex.split(lines[1])
    assert words[0] == sys.executable and "owner/big" in words
    assert {"--max-model-len=2048", "--max-logprobs=5"} < {*words}
    assert "--model-path=owner/other" in shlex.split(lines[3])


def test_argv_prints_one_backend_by_name(config: str) -> None:
    lines = run("--config", config, "--name", "other").stdout.splitlines()
    assert lines[0] == "# other" and len(lines) == 2


def test_argv_prints_the_command_of_flags() -> None:
    result = run("owner/name", "--backend", "vllm", "--option", "seed=3")
    assert "--seed=3" in shlex.split(result.stdout.splitlines()[1])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["a/m", "--backend", "native"], "none of these backends"),
        (["a/m", "--backend", "vllm", "--option", "sed=3"], "did you mean seed"),
        (["a/m", "--backend", "vllm", "--option", 'python="/no/such"'], "python: '/no/such'"),
    ],
)
def test_argv_errors_are_one_line(arguments: list[str], told: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error:") and told in result.stderr


def test_argv_of_an_unknown_backend_name_lists_the_names(config: str) -> None:
    result = run("--config", config, "--name", "bog")
    assert result.exit_code == 2
    assert "there are: fast, big, other" in result.stderr
