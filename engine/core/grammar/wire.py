"""What a `GrammarChecker` and its child say to each other: a length, then one JSON message."""

import struct

import msgspec

LENGTH = struct.Struct(">I")


class Compile(msgspec.Struct, frozen=True):
    grammar: str


class Verdict(msgspec.Struct, frozen=True):
    """A child's answer to `Compile`; its first message, before any, says that it is ready."""

    problem: str | None = None  # a sentence; None: the grammar compiles


def frame(message: Compile | Verdict) -> bytes:
    payload = msgspec.json.encode(message)
    return LENGTH.pack(len(payload)) + payload
