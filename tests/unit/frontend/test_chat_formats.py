"""Conversations through a model's own templates: which one is used, and what its answers become."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.interfaces.backend import (
    ChatRequest,
    FinishEvent,
    GenerationContext,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
    ToolChoice,
)
from engine.core.interfaces.request import GenerateRequest, SamplingParams, TokenDelta
from engine.core.parsing.output import OutputFormat
from engine.core.text.chat_template import ChatTemplate
from engine.core.text.tokenizer import Tokenizer
from engine.frontend.generation import Generation
from engine.frontend.prompts import prepare_chat
from engine.frontend.text_model import TextModel, text_model
from tests.support.fakes.stub_engine import ToldEngine
from tests.support.files.tokenizer_files import byte_level_metadata
from tests.unit.core.text.test_tokenizer import write_directory
from tests.unit.frontend.test_generation import read

TOOL_USE = (
    "{% for t in tools %}{{ t.function.name }}: {% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Oslo"}},
}
HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
ANSWER = (
    "Hm.</think>\n\nLet me see.<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n"
    "</parameter>\n</function>\n</tool_call>"
)


def text_of(**metadata: Any) -> TextModel:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata() | metadata)
    shape = SimpleNamespace(vocab_size=tokenizer.vocab_size, eos_ids=(), encoder=None)
    return text_model(shape, tokenizer, None, 0)


@pytest.fixture(scope="module")
def text() -> TextModel:
    return text_of(**{"tokenizer.chat_template.tool_use": TOOL_USE})


def asked(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    context = GenerationContext(request_id="r", params=SamplingParams(max_tokens=99))
    return ChatRequest(context=context, messages=messages, **fields)


def prompt_of(text: TextModel, request: ChatRequest) -> str:
    ids = prepare_chat(text, request).token_ids
    return text.tokenizer.decode(ids, skip_special=False)


def test_the_tool_use_template_is_used_if_there_are_tools(text: TextModel) -> None:
    plain = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(text, asked(HELLO)) == plain
    assert prompt_of(text, asked(HELLO, tools=(TOOL,))) == f"weather: {plain}<think>\n"
    none = asked(HELLO, tools=(TOOL,), tool_choice=ToolChoice("none"))
    assert prompt_of(text, none) == plain
    assert text.emulated == ("embeddings",) and "tools" in text.capabilities


async def test_an_answer_becomes_reasoning_text_and_calls(text: TextModel) -> None:
    request = asked(HELLO, tools=(TOOL,))
    prepared = prepare_chat(text, request)
    assert prepared.grammar is not None, "calls are well-formed"
    params = SamplingParams(max_tokens=999)
    sent = GenerateRequest(request_id="r", prompt=prepared.token_ids, params=params, eos_ids=(2,))
    generation = Generation(sent, text, prepared, ToldEngine())
    ids = text.tokenizer.encode(ANSWER)
    deltas = [TokenDelta("r", 0, (token,)) for token in ids]
    events = await read(generation, *deltas, TokenDelta("r", 0, (), finish_reason="stop"))
    reasoning = "".join(each.text for each in events if isinstance(each, ReasoningEvent))
    content = "".join(each.text for each in events if isinstance(each, TextEvent))
    calls = [each for each in events if isinstance(each, ToolCallEvent)]
    assert (reasoning, content) == ("Hm.", "Let me see.")
    assert calls[0].name == "weather"
    assert "".join(each.arguments for each in calls) == '{"city": "Oslo"}'
    assert FinishEvent(0, "tool_calls") in events


def test_named_templates_of_a_checkpoint_folder_are_read(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    directory = write_directory(tmp_path, chat_template=named)
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("D", "T")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("A")
    assert Tokenizer.from_directory(directory).tool_template == "A"


def output_of(source: str) -> tuple[OutputFormat, ChatTemplate]:
    template = ChatTemplate(source, "", "")
    return OutputFormat.of(source, {}, template.text), template


LOOP = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
REFUSES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + LOOP
)
DROPS = "{# system #}{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"


def test_tools_go_to_the_first_user_message_if_the_template_has_no_system_role() -> None:
    for source, role in ((REFUSES, "user"), (DROPS, "user"), (LOOP, "system")):
        output, template = output_of(source)
        messages, tools = output.prepare([HELLO], [TOOL])
        assert tools is None and messages[0]["role"] == role
        assert '"name": "weather"' in template.text(messages)


def test_calls_that_a_template_drops_are_written_into_the_text() -> None:
    source = "{{ tools | tojson }}<|tool_call|>" + LOOP
    output, template = output_of(source)
    earlier = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages, tools = output.prepare([HELLO, earlier], [TOOL])
    assert template.text(messages, tools).endswith(
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]'
    )


def test_arguments_and_content_have_the_form_that_the_template_expects() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}{% if m.content is none %}"
        "{% for c in m.tool_calls %}<tool_call>{{ '{' + c.function.arguments + '}' }}{% endfor %}"
        "{% endif %}{{ m.content or '' }}{% endfor %}"
    )
    output, template = output_of(source)
    earlier = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages, tools = output.prepare([HELLO, earlier], [TOOL])
    assert template.text(messages, tools).endswith('<tool_call>{{"city": "Oslo"}}')


PHI = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'system' and m.tools %}"
    "<|tool|>{{ m.tools }}<|/tool|>{% endif %}<|end|>{% endfor %}"
)


def test_templates_that_read_tools_from_the_system_message_get_them_there() -> None:
    output, template = output_of(PHI)
    assert output.tools.name == "phi4" and output.tools.native
    for talk in ([HELLO], [{"role": "system", "content": "Be brief."}, HELLO]):
        messages, tools = output.prepare(talk, [TOOL])
        text = template.text(messages, tools)
        assert '<|tool|>[{"name": "weather"' in text and text.endswith("hello<|end|>")
    assert output.prepare([HELLO], [])[0] == [HELLO]


def test_tools_that_a_template_drops_are_described_in_text() -> None:
    source = "{# tools #}{% if tools %}{% endif %}<tool_call>" + LOOP
    output, template = output_of(source)
    assert output.tools.native, "its code reads the tools"
    messages, tools = output.prepare([HELLO], [TOOL])
    assert tools is None and '"name": "weather"' in template.text(messages)


def test_earlier_reasoning_is_passed_under_every_name_that_templates_read() -> None:
    source = "{{ tools | tojson }}<tool_call>{% for m in messages %}{{ m.NAME or '-' }}{% endfor %}"
    earlier = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    for name in ("reasoning_content", "reasoning", "thinking"):
        output, template = output_of(source.replace("NAME", name))
        messages, _ = output.prepare([HELLO, earlier], [])
        assert template.text(messages).endswith("-Hm.")
    both = {**earlier, "content": "Wait.", "tool_calls": [CALL]}
    assert "thinking" not in output.prepare([both], [TOOL])[0][0]


def test_older_templates_get_tools_in_their_own_variable() -> None:
    source = "{% set said = 'Now ' + datetime + functions %}{{ said }} functools["
    output, template = output_of(source)
    assert output.tools.name == "functools" and output.tools.native
    assert '"name": "weather"' in template.text([HELLO], [TOOL])
