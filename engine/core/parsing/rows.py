"""The rows that describe how model families write tool calls and reasoning; reasoning formats.

The parser, the grammar and the writer of a format follow from its row. `tool_formats.py` has the
rows of call formats.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

# How arguments are written. "json": one JSON object. "tags": one element per argument (`param`).
# "python": keyword arguments with Python literals. "quoted": an object with bare keys, whose
# strings stand between two `quote` markers.
Encoding = Literal["json", "tags", "python", "quoted"]
SLOT = re.compile(r"\{(object|name|args|id|index|key|value|string|type)\}")
_TRIGGER = re.compile(r"(?:(?!\{(?:object|name|args|id|index)\})\S)+")


@dataclass(frozen=True)
class CallPart:
    """A variable part of a call."""

    name: str


Part = str | CallPart


def parts_of(text: str) -> tuple[Part, ...]:
    """Split a pattern into literal texts and slots."""
    pieces = SLOT.split(text)
    return tuple(
        CallPart(piece) if index % 2 else piece for index, piece in enumerate(pieces) if piece
    )


@dataclass(frozen=True)
class ReasoningRow:
    """The markers around a model's reasoning.

    `frame` are markers around the visible answer; they are dropped. If `repeats`, reasoning may
    also follow visible text.
    """

    open: str = "<think>"
    close: str = "</think>"
    frame: tuple[str, ...] = ()
    repeats: bool = False
    channels: bool = False  # whether reasoning is a message with its own header
    # Headers of visible messages: those before the last one, and those of the last one.
    remarks: tuple[str, ...] = ()
    finals: tuple[str, ...] = ()
    # Texts that a template of this format contains. Without them: one of the two markers.
    signs: tuple[str, ...] = ()


HARMONY_CHANNELS = ReasoningRow(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    ("<|call|>", "<|return|>"),
    channels=True,
    remarks=("<|channel|>commentary<|message|>",),
    finals=(
        "<|channel|>final<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
    ),
    signs=("<|channel|>", "<|message|>"),
)
RECIPIENTS = ReasoningRow(
    " to=self<|message|>",
    "<|eom|><|start|>assistant",
    ("<|eot|>",),
    channels=True,
    remarks=(" to=user<|message|>",),
    finals=(" to=user<|message|>",),
    signs=("<|eom|>", "<|message|>"),
)


@dataclass(frozen=True)
class CallRow:
    """The tool call format of a model family.

    The calls of an answer are `before`, then one or more `call` separated by `between`, then
    `after`. A call contains the slot {object} (a JSON object by the pattern `object`), or the slots
    {name} and {args}. {id} and {index} are a call's id and number.
    """

    name: str
    signs: tuple[str, ...]  # texts that a template of this format contains
    call: str
    before: str = ""
    between: str = ""
    after: str = ""
    object: str = '{"name": "{name}", "arguments": {args}}'
    encoding: Encoding = "json"
    param: str = ""  # one argument: {key} and {value}; {string} is true for strings, {type} a type
    nested: bool = False  # whether objects and arrays are elements in elements
    cdata: bool = False  # whether an argument may stand between <![CDATA[ and ]]>
    quote: str = ""  # the marker before and after a string of encoding "quoted"
    marker: str = ""  # the marker that begins calls, if it is not the first word of the pattern
    bare: bool = False  # whether an answer may begin with a call that has no marker
    one_call_per_message: bool = False  # whether the template refuses more than one
    short_ids: bool = False  # whether the template wants call ids of nine letters or digits
    # Text at the end of the generation prompt that belongs to the answer's format.
    primed: str = ""
    # The messages of an answer that is a series of messages, and headers of a message with a call.
    # The first header is written.
    messages: ReasoningRow | None = None
    headers: tuple[str, ...] = ()
    frame: tuple[str, ...] = ()  # markers before visible text; they are dropped
    # The row of a format with the same marker, which such models also write.
    other: str = ""

    @cached_property
    def trigger(self) -> str:
        """The marker that begins calls in an answer; "" if they have none."""
        if self.marker or self.bare:
            return self.marker
        found = _TRIGGER.match(self.before or self.call)
        assert found is not None, f"the row {self.name} begins with a slot"
        return found.group()

    @cached_property
    def keys(self) -> tuple[str, str]:
        """The names of the two members of an object that hold the name and the arguments."""
        name = re.search(r'"(\w+)": "\{name\}"', self.object)
        arguments = re.search(r'"(\w+)": \{args\}', self.object)
        assert name is not None and arguments is not None, self.object
        return name.group(1), arguments.group(1)

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """All literal texts of the format."""
        patterns = (self.trigger, *self.headers, self.before, self.call, self.between, self.after)
        texts = [part for pattern in (*patterns, self.param) for part in parts_of(pattern)]
        return (*(text for text in texts if isinstance(text, str)), self.quote)


THINK = ReasoningRow()
REASONING_ROWS: tuple[ReasoningRow, ...] = (
    HARMONY_CHANNELS,
    RECIPIENTS,
    ReasoningRow("<|START_THINKING|>", "<|END_THINKING|>", repeats=True),
    ReasoningRow("<seed:think>", "</seed:think>"),
    ReasoningRow("<mm:think>", "</mm:think>"),
    ReasoningRow("[THINK]", "[/THINK]"),
    ReasoningRow("<|inner_prefix|>", "<|inner_suffix|>", repeats=True),
    ReasoningRow("<|channel>thought\n", "<channel|>", repeats=True),
    ReasoningRow("<|begin_of_thought|>", "<|end_of_thought|>"),
    ReasoningRow("<thought>", "</thought>"),
    ReasoningRow(
        "<|think|>",
        "<|end|>",
        ("<|begin|>assistant<|content|>", "<|content|>", "<|begin|>assistant"),
        signs=("<|think|>", "<|begin|>"),
    ),
    ReasoningRow(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        signs=("<|open|>", "<|sep|>", "'think'"),
    ),
    ReasoningRow(
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        ("[END FINAL RESPONSE]",),
    ),
    ReasoningRow("Here is my thought process:", "Here is my response:"),
    ReasoningRow("<think:opensource>", "</think:opensource>", signs=("<think{}>", ":opensource")),
    ReasoningRow(frame=("<response>", "</response>"), signs=("<think>", "<response>")),
    ReasoningRow(frame=("<answer>", "</answer>"), signs=("<think>", "<answer>")),
    THINK,
)


def reasoning_row(template: str | None) -> ReasoningRow | None:
    """The reasoning format that the template shows, or None."""
    source = template or ""
    for row in REASONING_ROWS:
        if row.signs and all(sign in source for sign in row.signs):
            return row
        if not row.signs and (row.open.strip() in source or row.close in source):
            return row
    return None
