"""`engine chat` with a stand-in for the model: what stays in the conversation, and what ends it."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.cli.commands import app
from engine.cli.talk.markdown import MarkdownPrinter
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import Event, TextEvent, UsageEvent


class FakeLLM:
    """Answers with the number of messages; refuses a conversation whose last one is "too long"."""

    preset_parameters: Mapping[str, Any] = MappingProxyType({})
    chat_sampling: Mapping[str, Any] = MappingProxyType({"temperature": 0.6, "top_k": 20})

    def __init__(self, model: str, *, settings: dict[str, Any]) -> None:
        self.card = self
        self.id = model

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def stream(self, prompt: str, params: Any, *, grammar: Any) -> Iterator[Event]:
        constraint = "" if grammar is None else f" by {grammar.kind} {grammar.source}"
        yield TextEvent(0, f"{prompt!r} at {params.temperature:g}{constraint}", 1)

    def stream_chat(
        self, messages: list[dict[str, str]], params: Any, *, grammar: Any = None
    ) -> Iterator[Event]:
        if messages[-1]["content"] == "too long":
            raise InvalidRequestError("The conversation is too long.")
        if messages[-1]["content"] == "tell me everything":
            yield TextEvent(0, "It began", 2)
            raise KeyboardInterrupt
        if messages[-1]["content"] == "sampling?":
            yield TextEvent(0, f"{params.temperature:g} {params.top_k}", 1)
        yield TextEvent(0, f"<{len(messages)} messages>", 1)
        yield UsageEvent(5, 11, 0, decode_s=2.0)


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.llm.LLM", FakeLLM)


def test_a_refused_message_is_removed_and_the_conversation_continues() -> None:
    result = CliRunner().invoke(app, ["chat", "some-model"], input="hello\ntoo long\nagain\n")
    assert result.exit_code == 0, result.output
    assert "<1 messages>" in result.stdout
    assert "The conversation is too long." in result.stderr
    assert "<3 messages>" in result.stdout


def test_chat_reset_keeps_the_system_message() -> None:
    lines = "hello\n/reset\nhello\n/exit\nnever read\n"
    result = CliRunner().invoke(app, ["chat", "m", "--system", "Be brief."], input=lines)
    assert result.stdout.count("<2 messages>") == 2
    assert result.stdout.count("you>") == 4


def test_an_interrupted_answer_stays_in_the_conversation() -> None:
    result = CliRunner().invoke(app, ["chat", "m"], input="tell me everything\nand then?\n")
    assert result.exit_code == 0, result.output
    assert "cut short" in result.stdout and "<3 messages>" in result.stdout


def test_generate_reads_its_prompt_from_the_argument_or_stdin() -> None:
    result = CliRunner().invoke(app, ["generate", "Once"], input="unread")
    assert result.stdout == "'Once' at 0\n"
    result = CliRunner().invoke(app, ["generate", "-", "--temperature", "0.5"], input="two\nlines")
    assert result.stdout == "'two\\nlines' at 0.5\n"
    result = CliRunner().invoke(app, ["generate", "Once", "--chat"])
    assert result.stdout == "<1 messages>\n"


def test_shown_speed_counts_the_tokens_after_the_first() -> None:
    result = CliRunner().invoke(app, ["chat", "m"], input="hello\n")
    assert "11 tokens, 5 tok/s" in result.stdout


def test_grammar_and_schema_flags_constrain_the_output(tmp_path: Path) -> None:
    grammar = tmp_path / "g.gbnf"
    grammar.write_text('root ::= "a"')
    result = CliRunner().invoke(app, ["generate", "x", "--grammar-file", str(grammar)])
    assert result.stdout == "'x' at 0 by grammar root ::= \"a\"\n"
    result = CliRunner().invoke(app, ["generate", "x", "-j", "{}"])
    assert result.stdout == "'x' at 0 by json_schema {}\n"
    both = ["generate", "x", "-j", "{}", "--grammar-file", str(grammar)]
    assert CliRunner().invoke(app, both).exit_code == 2


def test_run_answers_a_message_and_reads_stdin() -> None:
    result = CliRunner().invoke(app, ["run", "m", "Count", "this:"], input="some text\n")
    assert (result.exit_code, result.stdout) == (0, "<1 messages>\n")


def test_chats_use_and_show_the_sampling_that_suits_the_model() -> None:
    result = CliRunner().invoke(app, ["chat", "m", "--temperature", "0"], input="sampling?\n")
    assert "Sampling: temperature 0.0, top_k 20;" in result.stdout
    assert "0 20<1 messages>" in result.stdout
    result = CliRunner().invoke(app, ["run", "m", "sampling?", "--verbose"], input="")
    assert "0.6 20<1 messages>" in result.stdout
    assert "sampling: temperature 0.6, top_k 20" in result.stderr


def test_the_markdown_printer_wraps_between_words_and_loses_no_text() -> None:
    """In pieces of any size, at any width."""
    text = (
        "Some words\n\n- an item that is long enough to wrap\n  more   spaces\n```\nx   y\n```\n."
    )
    for width, size in itertools.product((20, 27, 80), (1, 3, 100)):
        shown: list[str] = []
        printer = MarkdownPrinter(shown.append, width, styled=False)
        for start in range(0, len(text), size):
            printer.feed(text[start : start + size])
        printer.close()
        assert "".join(shown).split() == text.split()
        assert max(map(len, "".join(shown).splitlines())) <= width
        assert "x   y" in "".join(shown)


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    shown: list[str] = []
    printer = MarkdownPrinter(shown.append, 80, styled=False)
    printer.feed("a\x1b]0;title\x07b")
    printer.close()
    assert "".join(shown) == "a]0;titleb"
