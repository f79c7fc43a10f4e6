"""Finds out how a chat template handles tool calls, by rendering a small conversation.

The conversation has texts that occur nowhere else. What stands around them in the rendered text
are the markers of the format.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from engine.core.errors import EngineError
from engine.core.parsing.calls import CallReader
from engine.core.parsing.formats import TemplateHabits, ToolFormat
from engine.core.parsing.pieces import ToolCallPiece
from engine.core.parsing.row_reader import RowReader
from engine.core.parsing.rows import SLOT, CallRow
from engine.core.parsing.source import Source, Steps
from engine.core.parsing.tool_formats import CALL_ROWS, JSON, LLAMA3

# Renders messages and tools. Raises an `EngineError` if the template refuses them.
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]

_NAMES = ("probe_one", "probe_two")
_KEYS = ("first_key", "second_key")
_TEXT, _NUMBER = "probe value", 8192
_QUESTION, _SYSTEM = "probe question", "probe instruction"
_CALL_ID = "probe0001"
_PARAMETERS = {
    "type": "object",
    "properties": {
        _KEYS[0]: {"type": "string", "description": "text"},
        _KEYS[1]: {"type": "integer", "description": "number"},
    },
    "required": [_KEYS[0]],
}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "A tool.", "parameters": _PARAMETERS},
    }
    for name in _NAMES
]
_MAX_MARKER_CHARS = 96
_MAX_ANSWER_CHARS = 1024
# An end-of-turn token behind the calls. The model ends its turn with it; it is no part of the text.
_END = re.compile(r"(?:<[|｜][^<>]*(?:eos|eot|im_end|end_of|endoftext)[^<>]*[|｜]>|</s>|\s)+$")


def _call(number: int, json_arguments: bool = False) -> dict[str, Any]:
    arguments: Any = {_KEYS[0]: _TEXT, _KEYS[1]: _NUMBER}
    if json_arguments:
        arguments = f'{{"{_KEYS[0]}": "{_TEXT}", "{_KEYS[1]}": {_NUMBER}}}'
    return {
        "id": f"{_CALL_ID[:-1]}{number + 1}",
        "type": "function",
        "function": {"name": _NAMES[number], "arguments": arguments},
    }


def _rendered(
    render: Render, calls: Sequence[Mapping[str, Any]], content: str | None = ""
) -> str | None:
    """What the template writes after the question for an answer with these calls."""
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        answer["tool_calls"] = list(calls)
    try:
        text = render([{"role": "user", "content": _QUESTION}, answer], _TOOLS)
    except EngineError:
        return None
    return text.rpartition(_QUESTION)[2]


def rendered_habits(render: Render, tool_format: ToolFormat) -> TemplateHabits:
    """What the template does with a system message and with earlier calls."""
    question = {"role": "user", "content": _QUESTION}
    try:
        shown = render([{"role": "system", "content": _SYSTEM}, question], None)
    except EngineError:
        shown = ""
    takes_system = _SYSTEM in shown
    if not tool_format.native:
        return TemplateHabits(takes_system)
    place = _place_of_tools(render)
    for json_arguments in (False, True):
        for content in ("", None):
            text = _rendered(render, [_call(0, json_arguments)], content)
            if text is not None and _TEXT in text:
                return TemplateHabits(takes_system, place, True, json_arguments, content is None)
    return TemplateHabits(takes_system, place, writes_calls=False)


def _place_of_tools(render: Render) -> Literal["variable", "system", "nowhere"]:
    question = {"role": "user", "content": _QUESTION}
    system = {"role": "system", "content": _SYSTEM, "tools": _NAMES[0]}
    try:
        if _NAMES[0] in render([question], _TOOLS):
            return "variable"
        return "system" if _NAMES[0] in render([system, question], None) else "nowhere"
    except EngineError:
        return "variable"  # a request will be told what the template refuses


def rendered_format(render: Render) -> ToolFormat | None:
    """The format of the calls that the template renders; None if it can't be recognized."""
    for json_arguments in (False, True):
        one = _rendered(render, [_call(0, json_arguments)])
        if one is None or _TEXT not in one:
            continue
        if len(one) > _MAX_ANSWER_CHARS or SLOT.search(one):
            return None
        two = _rendered(render, [_call(0, json_arguments), _call(1, json_arguments)])
        if two is not None and len(two) > 2 * _MAX_ANSWER_CHARS:
            return None
        plain = _rendered(render, [], _TEXT)
        row = _row(one, two, plain)
        if (
            row is None
            or not _reads(row, one)
            or (two and _NAMES[1] in two and not _reads(row, two))
        ):
            return None
        return ToolFormat(row, native=True)
    return None


def _sections(reader: RowReader, source: Source) -> Steps[None]:
    while (yield from source.text_until(reader.row.trigger)):
        yield from reader.section()


def _reads(row: CallRow, text: str) -> bool:
    """Whether the row's parser finds the calls in a rendered answer."""
    start = text.find("{") if row.bare else text.find(row.trigger)
    if start < 0:
        return False
    source = Source()
    calls = CallReader(source, frozenset(_NAMES), str, dict.fromkeys(_NAMES, _PARAMETERS))
    source.push(text[start:])
    source.end()
    reader = RowReader(row, source, calls)
    for _ in reader.begin() if row.bare else _sections(reader, source):
        pass
    pieces = source.take_pieces()
    arguments = "".join(each.arguments for each in pieces if isinstance(each, ToolCallPiece))
    number = 1 + (_NAMES[1] in text)
    found = re.sub(r"\s", "", arguments)
    return found == re.sub(r"\s", "", str(_call(0, True)["function"]["arguments"])) * number


def _row(one: str, two: str | None, plain: str | None) -> CallRow | None:
    known = next(
        (row for row in CALL_ROWS if all(sign in one for sign in row.signs) and row.trigger in one),
        None,
    )
    if known is not None:
        return known
    framed = _unframed(one, plain)
    start, end = framed.find(_NAMES[0]), framed.rfind(str(_NUMBER))
    if start < 0 or end < start:
        return None
    pattern = _pattern(framed)
    if pattern is None:
        return None
    before, call, param, encoding = pattern
    after = between = ""
    if two is not None and _NAMES[1] in two:
        before, call, between, after = _section(before, call, param, _unframed(two, plain))
    before, call = before.lstrip(), call if before.strip() else call.lstrip()
    call, after = (call, _END.sub("", after)) if after.strip() else (_END.sub("", call), "")
    if not before and call.startswith("{object}"):
        return LLAMA3 if '"parameters"' in framed else JSON
    if not before and (not call or call.startswith("{")):
        return None
    if encoding == "tags":
        return CallRow("probed", (), call, before, between, after, encoding="tags", param=param)
    return CallRow("probed", (), call, before, between, after)


def _unframed(text: str, plain: str | None) -> str:
    """The text without what the template writes around any answer."""
    if plain is None or _TEXT not in plain:
        return text
    head, _, tail = plain.partition(_TEXT)
    text = text[_shared(text, head) :]
    return text[: len(text) - _shared(text[::-1], tail[::-1])]


def _shared(text: str, other: str) -> int:
    """Length of the longest beginning of `text` that `other` also has, apart from whitespace."""
    size = 0
    expected = (char for char in other if not char.isspace())
    for place, char in enumerate(text):
        if not char.isspace():
            if char != next(expected, ""):
                break
            size = place + 1
    return size


def _pattern(text: str) -> tuple[str, str, str, str] | None:
    """The parts of a rendered call: what comes before it, its pattern, the pattern of an argument
    and the encoding.
    """
    head, _, rest = text.partition(_NAMES[0])
    # Some templates write the name twice, as a recipient and in the call.
    while _NAMES[0] in rest:
        more, _, rest = rest.partition(_NAMES[0])
        head += _NAMES[0] + more
    json_text = re.search(
        rf'\{{\s*"{_KEYS[0]}":\s*"{_TEXT}",\s*"{_KEYS[1]}":\s*{_NUMBER}\s*\}}', rest
    )
    if json_text is not None:
        middle, tail = rest[: json_text.start()], rest[json_text.end() :]
        if max(len(head), len(middle), len(tail)) > _MAX_MARKER_CHARS or _NAMES[0] in head:
            return None
        head = head.replace(f"{_CALL_ID[:-1]}1", "{id}")
        middle = middle.replace(f"{_CALL_ID[:-1]}1", "{id}")
        tail = _without_id(tail)
        opening = re.search(r'\{\s*"\w+":\s*"$', head)
        if opening is not None and middle.rstrip().endswith(":") and tail.lstrip().startswith("}"):
            return head[: opening.start()], "{object}" + tail.lstrip()[1:], "", "json"
        return "", f"{head}{{name}}{middle}{{args}}{tail}", "", "json"
    found = re.fullmatch(
        rf"(.*?){_KEYS[0]}(.*?){_TEXT}(.*?){_KEYS[1]}(.*?){_NUMBER}(.*)", rest, re.DOTALL
    )
    if found is None or _NAMES[0] in head:
        return None
    first, joint, between, second, tail = found.groups()
    return _elements(head, first, joint, between, second, tail)


def _without_id(text: str) -> str:
    """The text without a member for the call's id."""
    return re.sub(rf',?\s*"\w+":\s*"{_CALL_ID[:-1]}1"', "", text)


def _elements(
    head: str, first: str, joint: str, between: str, second: str, tail: str
) -> tuple[str, str, str, str] | None:
    """The pattern of a call with one element per argument: `first` KEY `joint` VALUE `between` KEY
    `second` VALUE `tail`.
    """
    if joint != second or not joint.strip():
        return None
    # An element begins with the longest text that stands before both keys.
    size = 0
    while size < min(len(first), len(between)) and first[-1 - size] == between[-1 - size]:
        size += 1
    opening = _from_tag(between[len(between) - size :])
    closing = between[: len(between) - len(opening)]
    if not opening.strip() or not closing.strip() or not tail.startswith(closing.rstrip("\n")):
        return None
    name_end = first[: len(first) - len(opening)]
    rest = tail[len(closing) :] if tail.startswith(closing) else tail[len(closing.rstrip()) :]
    call = f"{head}{{name}}{name_end}{{args}}{rest}"
    return "", call, f"{opening}{{key}}{joint}{{value}}{closing}", "tags"


def _from_tag(text: str) -> str:
    """The text from its first whole tag on."""
    place = text.find("<")
    return text[place:] if place >= 0 else text.lstrip("\n")


def _section(before: str, call: str, param: str, two: str) -> tuple[str, str, str, str]:
    """Split a pattern into a section around all calls and the call, given two rendered calls."""
    pattern = before + call
    place = re.search(r"\{(?:object|name)\}", pattern)
    assert place is not None
    head = pattern[: place.start()]
    tail = re.split(r"\{(?:object|args)\}", pattern)[-1]
    number = two.find(str(_NUMBER))
    behind = two[number + len(str(_NUMBER)) : two.find(_NAMES[1])]
    if "{object}" in pattern:
        behind = behind.partition("}")[2].partition("}")[2]
        behind = behind[: behind.rfind("{")]
    elif param:
        behind = behind.removeprefix(param.partition("{value}")[2])
    else:
        behind = behind.removeprefix("}")
    # `behind` is the end of one call, a separator and the beginning of the next call.
    start = _common_prefix(behind, tail)
    if start.rfind("<") > start.rfind(">"):
        start = start[: start.rfind("<")]
    rest = behind[len(start) :]
    opening = _from_tag(_common_suffix(rest, head))
    between = rest[: len(rest) - len(opening)]
    own = pattern[len(head) : len(pattern) - len(tail)]
    return (
        head[: len(head) - len(opening)],
        f"{opening}{own}{start}",
        between,
        tail[len(start) :],
    )


def _common_prefix(left: str, right: str) -> str:
    size = 0
    while size < min(len(left), len(right)) and left[size] == right[size]:
        size += 1
    return left[:size]


def _common_suffix(left: str, right: str) -> str:
    size = 0
    while size < min(len(left), len(right)) and left[-1 - size] == right[-1 - size]:
        size += 1
    return left[len(left) - size :] if size else ""
