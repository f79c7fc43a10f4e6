"""`engine chat` with a stand-in for the model: what stays in the conversation, and what ends it."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.cli.main import app
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import Event, TextEvent, UsageEvent


class FakeLLM:
    """Answers with the number of messages; refuses a conversation whose last one is "too long"."""

    def __init__(self, model: str, *, settings: dict[str, Any]) -> None:
        self.card = self
        self.id = model

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, prompt: str, params: Any) -> Iterator[Event]:
        yield TextEvent(0, f"{prompt!r} at {params.temperature:g}", 1)

    def stream_chat(self, messages: list[dict[str, str]], params: Any) -> Iterator[Event]:
        if messages[-1]["content"] == "too long":
            raise InvalidRequestError("The conversation is too long.")
        if messages[-1]["content"] == "tell me everything":
            yield TextEvent(0, "It began", 2)
            raise KeyboardInterrupt
        yield TextEvent(0, f"<{len(messages)} messages>", 1)
        yield UsageEvent(5, 11, 0, decode_s=2.0)


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.llm.LLM", FakeLLM)


def test_a_refused_message_is_taken_back_and_the_conversation_goes_on() -> None:
    result = CliRunner().invoke(app, ["chat", "some-model"], input="hello\ntoo long\nagain\n")
    assert result.exit_code == 0, result.output
    assert "<1 messages>" in result.stdout
    assert "The conversation is too long." in result.stderr
    assert "<3 messages>" in result.stdout


def test_reset_keeps_the_system_message() -> None:
    lines = "hello\n/reset\nhello\n/exit\nnever read\n"
    result = CliRunner().invoke(app, ["chat", "m", "--system", "Be brief."], input=lines)
    assert result.stdout.count("<2 messages>") == 2
    assert result.stdout.count("you>") == 4


def test_an_answer_that_was_cut_short_is_part_of_the_conversation() -> None:
    result = CliRunner().invoke(app, ["chat", "m"], input="tell me everything\nand then?\n")
    assert result.exit_code == 0, result.output
    assert "cut short" in result.stdout and "<3 messages>" in result.stdout


def test_a_prompt_comes_from_the_line_or_from_standard_input() -> None:
    result = CliRunner().invoke(app, ["generate", "Once"], input="unread")
    assert result.stdout == "'Once' at 0\n"
    result = CliRunner().invoke(app, ["generate", "-", "--temperature", "0.5"], input="two\nlines")
    assert result.stdout == "'two\\nlines' at 0.5\n"
    result = CliRunner().invoke(app, ["generate", "Once", "--chat"])
    assert result.stdout == "<1 messages>\n"


def test_speed_is_that_of_the_tokens_after_the_first() -> None:
    result = CliRunner().invoke(app, ["chat", "m"], input="hello\n")
    assert "11 tokens, 5 tok/s" in result.stdout
