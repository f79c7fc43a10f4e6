"""Messages between a `GrammarChecker` and its child: a length, then JSON."""

import struct

import msgspec

LENGTH = struct.Struct(">I")


class Compile(msgspec.Struct, frozen=True):
    grammar: str


class Verdict(msgspec.Struct, frozen=True):
    """The child's answer to `Compile`. Its first message, sent unasked, says that it is ready."""

    problem: str | None = None  # a sentence; None if the grammar compiles


def frame(message: Compile | Verdict) -> bytes:
    payload = msgspec.json.encode(message)
    return LENGTH.pack(len(payload)) + payload
