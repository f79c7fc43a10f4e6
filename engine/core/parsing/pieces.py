"""The output of the parsers: pieces of text, reasoning and tool calls. Pieces are final and in
order. All pieces of one kind, joined, don't depend on how the parser's input was split.
"""

import msgspec


class TextPiece(msgspec.Struct, frozen=True):
    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    text: str


class ToolCallPiece(msgspec.Struct, frozen=True):
    """Part of a tool call. All pieces of one call have the same `index`. The first piece has
    `call_id` and `name` and no arguments. The joined arguments of a call are a JSON object, or a
    prefix of one if the call broke off.
    """

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


Piece = TextPiece | ReasoningPiece | ToolCallPiece
