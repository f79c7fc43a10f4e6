"""What a parser makes of generated text. Pieces are final and in order; joined, those of one kind
are the same however the text was cut on its way in.
"""

import msgspec


class TextPiece(msgspec.Struct, frozen=True):
    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    text: str


class ToolCallPiece(msgspec.Struct, frozen=True):
    """A part of a call. The first one of an `index` has `call_id` and `name` and no arguments yet;
    the arguments of all join to a JSON object, or to the beginning of one where the call broke off.
    """

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


Piece = TextPiece | ReasoningPiece | ToolCallPiece
