"""Every chat template that llama.cpp's sources carry: classified, rendered, read and forced.

The templates are taken from the folder in CHAT_TEMPLATES, or from the source package of
llama-cpp-python, which is downloaded.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from engine.core.grammar.child import byte_tokenizer
from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing.output import OutputFormat
from engine.core.parsing.pieces import TextPiece, ToolCallPiece
from engine.core.text.chat_template import ChatTemplate

pytestmark = pytest.mark.network

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a city"},
        "days": {"type": "integer", "description": "a number"},
    },
    "required": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "A tool.", "parameters": PARAMETERS},
    }
    for name in ("get_weather", "now")
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Paris", "days": 3}),
    ("now", {"city": 'a "b"\n<c>'}),
]
QUESTION = "What about the weather?"
# Templates that do not read tools at all.
WITHOUT_TOOLS = {
    *("HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it", "llama-cpp-rwkv-world"),
    *("microsoft-Phi-3.5-mini-instruct", "deepseek-ai-DeepSeek-V3.1"),
    *("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"),
}
# This template writes arguments with line ends. A forced call has none in them.
NOT_AS_FORCED = {"CohereForAI-c4ai-command-r-plus-tool_use"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("CHAT_TEMPLATES")
    if given:
        return Path(given)
    place = tmp_path_factory.mktemp("llama_cpp")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--no-binary=:all:", "llama-cpp-python"], cwd=place, check=True)
    with tarfile.open(next(place.glob("*.tar.gz"))) as archive:
        members = [each for each in archive if "/models/templates/" in each.name]
        archive.extractall(place, members=members, filter="data")
    return next(place.glob("**/models/templates"))


def answer_of(output: OutputFormat, template: ChatTemplate, num_calls: int) -> str:
    """What the template writes as the answer with the first calls, up to the end of its turn."""
    made = [
        {
            "id": f"abcdef12{number}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(CALLS[:num_calls])
    ]
    talk = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": made},
    ]
    text = template.text(*output.prepare(talk, TOOLS)).rpartition(QUESTION)[2]
    row = output.tools.row
    if row.messages is not None:
        return text[text.index("assistant") + len("assistant") :]
    marker = row.call.partition("{")[0] if not row.before else row.before
    start = text.find(marker.strip()) if marker.strip() else -1
    return text[start if start >= 0 else text.index("{") :].removeprefix(row.primed)


def read(output: OutputFormat, parts: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    parser = output.parser(TOOLS, ToolChoice(), opened=False)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.flush()
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallPiece):
            if piece.name is not None:
                calls.append((piece.name, ""))
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def num_forced(output: OutputFormat, text: str) -> int:
    """How many bytes of the text a grammar for required calls lets through."""
    grammar = output.tools.grammar(TOOLS, ToolChoice("required"), True)
    assert grammar is not None
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode()))


def test_every_llama_cpp_chat_template_renders_like_the_original(folder: Path) -> None:
    sources = sorted(folder.glob("*.jinja"))
    assert len(sources) > 30
    for path in sources:
        name, source = path.stem, path.read_text()
        template = ChatTemplate(source, "<BOS>", "<EOS>")
        output = OutputFormat.of(source, {}, template.text)
        assert output.tools.native is (name not in WITHOUT_TOOLS), name
        if not output.tools.native:
            continue
        assert output.habits.tools_in == "variable", name
        for num_calls in (1, 2):
            if num_calls == 2 and output.tools.row.one_call_per_message:
                continue
            text = answer_of(output, template, num_calls)
            rest, calls = read(output, [text])
            assert calls == CALLS[:num_calls], name
            assert read(output, list(text)) == (rest, calls), name
            for cut in range(len(text)):
                assert read(output, [text[:cut], text[cut:]]) == (rest, calls), (name, cut)
            if name not in NOT_AS_FORCED:
                # What is left is what the template writes behind the calls.
                end = text.encode()[num_forced(output, text) :].decode()
                assert not any(value in end for value in ("Paris", "days", "<c>")), (name, end)
