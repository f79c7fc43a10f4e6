"""Tool call formats of model families, one row each.

A row is matched against a chat template by its `signs`, in the order of `CALL_ROWS`. For templates
that no row fits, `rendered_calls.py` derives a row.
"""

from dataclasses import replace

from engine.core.parsing.rows import HARMONY_CHANNELS, RECIPIENTS, CallRow

_PARAMETERS = '{"name": "{name}", "parameters": {args}}'
_ACTION = '{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {args}}'


def _listed(name: str, signs: tuple[str, ...], opening: str, closing: str = "") -> CallRow:
    """A row for a JSON array of calls between two markers."""
    before, after = f"{opening}[", f"]{closing}"
    return CallRow(name, signs, "{object}", before, ", ", after, marker=opening)


def _dsml(name: str, signs: tuple[str, ...], section: str) -> CallRow:
    return CallRow(
        name,
        signs,
        '<｜DSML｜invoke name="{name}">\n{args}</｜DSML｜invoke>\n',
        before=f"<｜DSML｜{section}>\n",
        after=f"</｜DSML｜{section}>",
        encoding="tags",
        param='<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n',
    )


HERMES = CallRow(
    "hermes",
    ("<tool_call>",),
    "<tool_call>\n{object}\n</tool_call>",
    between="\n",
    other="qwen_xml",
)
LLAMA3 = CallRow(
    "llama3",
    ("<|python_tag|>",),
    "{object}",
    between="; ",
    object=_PARAMETERS,
    marker="<|python_tag|>",
    bare=True,
    one_call_per_message=True,
)
HARMONY = CallRow(
    "harmony",
    ("<|channel|>", "commentary", "<|message|>"),
    "{args}",
    marker="<|channel|>",
    one_call_per_message=True,
    messages=HARMONY_CHANNELS,
    headers=(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.{name}<|channel|>commentary json<|message|>",
    ),
)
LFM2 = CallRow(
    "lfm2",
    ("<|tool_call_start|>",),
    "{name}({args})",
    before="<|tool_call_start|>[",
    between=", ",
    after="]<|tool_call_end|>",
    marker="<|tool_call_start|>",
    encoding="python",
)
JSON = CallRow("json", (), "{object}", between=", ", bare=True)
PYTHONIC = CallRow(
    "pythonic",
    (),
    "{name}({args})",
    before="[",
    between=", ",
    after="]",
    encoding="python",
    bare=True,
)

CALL_ROWS: tuple[CallRow, ...] = (
    CallRow(
        "kimi_k3",
        ("<|open|>", "<|sep|>", "argument"),
        '<|open|>call tool="{name}" index="{index}"<|sep|>{args}<|close|>call<|sep|>',
        before="<|open|>tools<|sep|>",
        after="<|close|>tools<|sep|>",
        encoding="tags",
        param=('<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>'),
    ),
    CallRow(
        "minimax_m2",
        ("<minimax:tool_call>",),
        '<invoke name="{name}">\n{args}</invoke>\n',
        before="<minimax:tool_call>\n",
        after="</minimax:tool_call>",
        encoding="tags",
        param='<parameter name="{key}">{value}</parameter>\n',
    ),
    CallRow(
        "minimax_m3",
        ("]<]minimax[>[", "<invoke"),
        ']<]minimax[>[<invoke name="{name}">{args}]<]minimax[>[</invoke>\n',
        before="]<]minimax[>[<tool_call>\n",
        after="]<]minimax[>[</tool_call>",
        encoding="tags",
        param="]<]minimax[>[<{key}>{value}]<]minimax[>[</{key}>",
        nested=True,
    ),
    _dsml("deepseek_v4", ("｜DSML｜", "tool_calls>"), "tool_calls"),
    _dsml("deepseek_v3_2", ("｜DSML｜",), "function_calls"),
    CallRow(
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>", "```json"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{args}\n```<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        between="\n",
        after="<｜tool▁calls▁end｜>",
    ),
    CallRow(
        "deepseek_v3_1",
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{args}<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    CallRow(
        "kimi_k2",
        ("<|tool_calls_section_begin|>",),
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{args}"
        "<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    CallRow(
        "solar",
        ("<|tool_call:begin|>",),
        "<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{args}<|tool_call:end|>",
        before="<|tool_calls|>",
        after="<|calls|>",
    ),
    CallRow(
        "seed",
        ("<seed:tool_call>",),
        "<seed:tool_call>\n<function={name}>\n{args}</function>\n</seed:tool_call>",
        between="\n",
        encoding="tags",
        param="<parameter={key}>{value}</parameter>\n",
    ),
    CallRow(
        "qwen_xml",
        ("<tool_call>", "<function=", "<parameter="),
        "<tool_call>\n<function={name}>\n{args}</function>\n</tool_call>",
        between="\n",
        encoding="tags",
        param="<parameter={key}>\n{value}\n</parameter>\n",
        other="hermes",
    ),
    CallRow(
        "glm",
        ("<tool_call>", "<arg_key>"),
        "<tool_call>{name}\n{args}</tool_call>",
        between="\n",
        encoding="tags",
        param="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    CallRow(
        "minicpm5",
        ("<function name=", "<param name="),
        '<function name="{name}">{args}</function>',
        between="\n",
        marker="<function name=",
        encoding="tags",
        param='<param name="{key}">{value}</param>',
        cdata=True,
    ),
    CallRow(
        "functionary_v3_1",
        ("<function=", "</function>"),
        "<function={name}>{args}</function>",
    ),
    CallRow(
        "functionary_v3_2",
        (">>>all", "<|start_header_id|>"),
        ">>>{name}\n{args}",
        primed=">>>",
        frame=(">>>all\n",),
    ),
    HARMONY,
    CallRow(
        "muse",
        ("<atem:function_calls>", "<|message|>"),
        '<atem:invoke name="{name}">\n{args}</atem:invoke>\n',
        before="<atem:function_calls>\n",
        after="</atem:function_calls>",
        encoding="tags",
        param='<atem:parameter name="{key}">{value}</atem:parameter>\n',
        messages=RECIPIENTS,
        headers=(" to={name}<|message|>",),
    ),
    CallRow(
        "mistral_v11",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{args}",
        short_ids=True,
        other="mistral",
    ),
    CallRow(
        "mistral_v13",
        ("[TOOL_CALLS]", "[ARGS]"),
        "[TOOL_CALLS]{name}[ARGS]{args}",
        short_ids=True,
        other="mistral",
    ),
    replace(
        _listed("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]"), short_ids=True, other="mistral_v11"
    ),
    CallRow(
        "cohere",
        ("<|START_ACTION|>",),
        "{object}",
        before="<|START_ACTION|>[\n    ",
        between=",\n    ",
        after="\n]<|END_ACTION|>",
        object=_ACTION,
        marker="<|START_ACTION|>",
    ),
    CallRow(
        "command_r",
        ("Action:", "tool_name"),
        "{object}",
        before="Action:\n```json\n[\n    ",
        between=",\n    ",
        after="\n]```",
        object='{\n        "tool_name": "{name}",\n        "parameters": {args}\n    }',
        marker="Action:\n```json",
    ),
    CallRow(
        "apertus",
        ("<|tools_prefix|>",),
        '{"{name}": {args}}',
        before="<|tools_prefix|>[",
        between=", ",
        after="]<|tools_suffix|>",
        marker="<|tools_prefix|>",
    ),
    CallRow(
        "gemma4",
        ("<|tool_call>", "<tool_call|>"),
        "<|tool_call>call:{name}{args}<tool_call|>",
        marker="<|tool_call>",
        encoding="quoted",
        quote='<|"|>',
    ),
    CallRow(
        "functiongemma",
        ("<start_function_call>",),
        "<start_function_call>call:{name}{args}<end_function_call>",
        marker="<start_function_call>",
        encoding="quoted",
        quote="<escape>",
    ),
    LFM2,
    replace(LFM2, signs=("<|tool_list_start|>",)),
    replace(LFM2, signs=("List of tools: [", "<|im_start|>")),
    CallRow(
        "olmo3",
        ("<function_calls>",),
        "{name}({args})",
        before="<function_calls>",
        between="\n",
        after="</function_calls>",
        encoding="python",
    ),
    CallRow(
        "internlm",
        ("<|action_start|>", "<|plugin|>"),
        "<|action_start|><|plugin|>\n{object}<|action_end|>",
        between="\n",
        object=_PARAMETERS,
    ),
    _listed("nemotron_v2", ("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>"),
    CallRow(
        "minimax_m1",
        ("<tool_calls>", "<beginning_of_sentence>"),
        "{object}",
        before="<tool_calls>\n",
        between="\n",
        after="\n</tool_calls>",
        other="tool_calls_list",
    ),
    replace(
        _listed("tool_calls_list", ("<tool_calls>",), "<tool_calls>", "</tool_calls>"),
        other="minimax_m1",
    ),
    _listed("phi4", ("<|tool_call|>", "<|/tool_call|>"), "<|tool_call|>", "<|/tool_call|>"),
    _listed("phi4", ("<|tool|>", "<|/tool|>"), "<|tool_call|>", "<|/tool_call|>"),
    _listed("granite3", ("<|tool_call|>",), "<|tool_call|>"),
    _listed("functools", ("functools[",), "functools"),
    CallRow(
        "gigachat3_1",
        ("<|function_call|>",),
        "<|function_call|>{object}",
        one_call_per_message=True,
    ),
    CallRow(
        "gigachat3",
        ("function call", "<|role_sep|>"),
        "<|message_sep|>\n\nfunction call<|role_sep|>\n{object}",
        marker="<|message_sep|>",
        one_call_per_message=True,
    ),
    CallRow("granite_20b", ("<function_call>",), "<function_call> {object}", between="\n"),
    HERMES,
    replace(
        PYTHONIC,
        name="llama4",
        signs=("<|python_start|>",),
        marker="<|python_start|>",
        frame=("<|python_end|>",),
    ),
    LLAMA3,
)

ROWS_BY_NAME = {row.name: row for row in (*CALL_ROWS, JSON, PYTHONIC)}
