"""Tool calls as the chat templates of model families render them, and what a parser and a grammar
make of them.
"""

import functools
import json
from typing import Any

import pytest
from llguidance import LLMatcher

from engine.core.grammar.child import byte_tokenizer
from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing.formats import ToolFormat
from engine.core.parsing.parser import OutputParser
from engine.core.parsing.pieces import ReasoningPiece, TextPiece, ToolCallPiece
from engine.core.parsing.rows import CallRow, ReasoningRow
from engine.core.parsing.tool_formats import ROWS_BY_NAME

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("get_weather", "now")
]
SCHEMAS = {tool["function"]["name"]: PARAMETERS for tool in TOOLS}
PARIS: dict[str, Any] = {"city": "Paris", "days": 3}
ODD: dict[str, Any] = {"city": 'a "b"\n<c>'}
CALLS = [("get_weather", PARIS), ("now", ODD)]
BYTES = byte_tokenizer()
REQUIRED, AUTO = ToolChoice("required"), ToolChoice()
OBJECTS = (
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    r'{"name": "now", "arguments": {"city": "a \"b\"\n<c>"}}',
)
_LISTED = f"[{', '.join(OBJECTS)}]"
JSON_ARGUMENTS = ('{"city": "Paris", "days": 3}', r'{"city": "a \"b\"\n<c>"}')


def _dsml(section: str) -> str:
    return (
        f"<｜DSML｜{section}>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="now">\n'
        '<｜DSML｜parameter name="city" string="true">a "b"\n<c></｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        f"</｜DSML｜{section}>"
    )


def _each(pattern: str, between: str = "") -> str:
    """Both calls by one pattern with the name and the JSON arguments."""
    names = ("get_weather", "now")
    pairs = zip(names, JSON_ARGUMENTS, strict=True)
    return between.join(pattern.replace("NAME", name).replace("ARGS", args) for name, args in pairs)


TEXTS: dict[str, str] = {
    "apertus": "<|tools_prefix|>[" + _each('{"NAME": ARGS}', ", ") + "]<|tools_suffix|>",
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f"{JSON_ARGUMENTS[0]}}},\n"
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": '
        f"{JSON_ARGUMENTS[1]}}}\n]<|END_ACTION|>"
    ),
    "command_r": (
        'Action:\n```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": '
        f"{JSON_ARGUMENTS[0]}\n    }},\n"
        '    {\n        "tool_name": "now",\n        "parameters": '
        f"{JSON_ARGUMENTS[1]}\n    }}\n]```"
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>"
        + _each(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>",
            "\n",
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v3_1": (
        "<｜tool▁calls▁begin｜>"
        + _each("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v3_2": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "functionary_v3_1": _each("<function=NAME>ARGS</function>"),
    "functionary_v3_2": _each(">>>NAME\nARGS"),
    "functiongemma": (
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}"
        '<end_function_call><start_function_call>call:now{city:<escape>a "b"\n<c><escape>}'
        "<end_function_call>"
    ),
    "functools": f"functools{_LISTED}",
    "gemma4": (
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:now{city:<|"|>a "b"\n<c><|"|>}<tool_call|>'
    ),
    "gigachat3": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{OBJECTS[0]}",
    "gigachat3_1": f"<|function_call|>{OBJECTS[0]}",
    "glm": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        '<tool_call>now\n<arg_key>city</arg_key>\n<arg_value>a "b"\n<c></arg_value>\n</tool_call>'
    ),
    "granite3": f"<|tool_call|>{_LISTED}",
    "granite_20b": f"<function_call> {OBJECTS[0]}\n<function_call> {OBJECTS[1]}",
    "harmony": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{JSON_ARGUMENTS[0]}"
    ),
    "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in OBJECTS),
    "internlm": "\n".join(
        f"<|action_start|><|plugin|>\n{each.replace('arguments', 'parameters')}<|action_end|>"
        for each in OBJECTS
    ),
    "json": _LISTED,
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{JSON_ARGUMENTS[0]}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>"
        f"{JSON_ARGUMENTS[1]}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>a "b"\n<c><|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "lfm2": (
        "<|tool_call_start|>[get_weather(city='Paris', days=3), now(city='a \"b\"\n<c>')]"
        "<|tool_call_end|>"
    ),
    "llama4": "[get_weather(city='Paris', days=3), now(city='a \"b\"\\n<c>')]",
    "llama3": OBJECTS[0].replace("arguments", "parameters"),
    "minicpm5": (
        '<function name="get_weather"><param name="city">Paris</param>'
        '<param name="days">3</param></function>\n'
        '<function name="now"><param name="city">a "b"\n<c></param></function>'
    ),
    "minimax_m1": "<tool_calls>\n" + "\n".join(OBJECTS) + "\n</tool_calls>",
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>'
        '\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n'
        '<parameter name="city">a "b"\n<c></parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "minimax_m3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris'
        "]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n"
        ']<]minimax[>[<invoke name="now">]<]minimax[>[<city>a "b"\n<c>]<]minimax[>[</city>'
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    ),
    "mistral": (
        f"[TOOL_CALLS][{OBJECTS[0][:-1]}, "
        f'"id": "abcdef123"}}, {OBJECTS[1][:-1]}, "id": "abcdef124"}}]'
    ),
    "mistral_v11": _each("[TOOL_CALLS]NAME[CALL_ID]abcdef123[ARGS]ARGS").replace(
        f"[{JSON_ARGUMENTS[0]}]", "[ARGS]"
    ),
    "mistral_v13": _each("[TOOL_CALLS]NAME[ARGS]ARGS"),
    "muse": (
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
        "<|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n"
        '<atem:invoke name="now">\n<atem:parameter name="city">a "b"\n<c></atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    ),
    "nemotron_v2": f"<TOOLCALL>{_LISTED}</TOOLCALL>",
    "olmo3": (
        '<function_calls>get_weather(city="Paris", days=3)\nnow(city="a \\"b\\"\\n<c>")'
        "</function_calls>"
    ),
    "phi4": f"<|tool_call|>{_LISTED}<|/tool_call|>",
    "pythonic": "[get_weather(city='Paris', days=3), now(city='a \"b\"\\n<c>')]",
    "qwen_xml": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        '<function=now>\n<parameter=city>\na "b"\n<c>\n</parameter>\n</function>\n</tool_call>'
    ),
    "seed": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n"
        '<function=now>\n<parameter=city>a "b"\n<c></parameter>\n</function>\n</seed:tool_call>'
    ),
    "solar": "<|tool_calls|>"
    + _each(
        "<|tool_call:begin|>abcdef123<|tool_call:name|>NAME<|tool_call:args|>ARGS<|tool_call:end|>"
    )
    + "<|calls|>",
    "tool_calls_list": f"<tool_calls>{_LISTED}</tool_calls>",
}
TEXTS["mistral_v11"] = "".join(
    f"[TOOL_CALLS]{name}[CALL_ID]abcdef123[ARGS]{args}"
    for (name, _), args in zip(CALLS, JSON_ARGUMENTS, strict=True)
)
TEXTS["mistral_v13"] = "".join(
    f"[TOOL_CALLS]{name}[ARGS]{args}" for (name, _), args in zip(CALLS, JSON_ARGUMENTS, strict=True)
)
SINGLE = {"gigachat3", "gigachat3_1", "harmony", "llama3"}
every_row = pytest.mark.parametrize("name", ROWS_BY_NAME)
Joined = tuple[str, list[tuple[str, Any]], str]


def parse(
    row: CallRow, parts: list[str], reasoning: ReasoningRow | None = None, opened: bool = False
) -> Joined:
    """Text, calls with parsed arguments, and reasoning."""
    reasoning = reasoning or row.messages
    parser = OutputParser(ToolFormat(row, True), frozenset(SCHEMAS), reasoning, opened, SCHEMAS)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.flush()
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallPiece):
            if piece.name is not None:
                calls.append((piece.name, ""))
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    return text, [(name, json.loads(arguments)) for name, arguments in calls], thoughts


def own_text(name: str) -> tuple[CallRow, str, list[tuple[str, Any]]]:
    """A row, what its model writes after the prompt, and the calls in it."""
    row = ROWS_BY_NAME[name]
    return row, TEXTS[name].removeprefix(row.primed), CALLS[: 1 if name in SINGLE else 2]


@functools.lru_cache(maxsize=4)
def compiled(grammar: str) -> LLMatcher:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: str | None, text: str) -> bool:
    assert grammar is not None
    matcher = compiled(grammar).deep_copy()
    ids = list(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
