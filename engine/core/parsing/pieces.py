"""Parser output. Pieces are final and in order. Joined pieces of one kind don't depend on how the
input was split.
"""

import msgspec


class TextPiece(msgspec.Struct, frozen=True):
    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    text: str


class ToolCallPiece(msgspec.Struct, frozen=True):
    """Part of a tool call. The first piece of an `index` has `call_id` and `name` and no arguments.
    The joined arguments are a JSON object, or a prefix of one if the call broke off.
    """

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


Piece = TextPiece | ReasoningPiece | ToolCallPiece
