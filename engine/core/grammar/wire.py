"""Messages between a `GrammarChecker` and its child process. A message is JSON, preceded by its
length in bytes.
"""

import struct

import msgspec

LENGTH = struct.Struct(">I")


class Compile(msgspec.Struct, frozen=True):
    grammar: str


class Verdict(msgspec.Struct, frozen=True):
    """The child's answer to `Compile`. The child also sends a `Verdict` when it has started, to say
    that it is ready.
    """

    problem: str | None = None  # what is wrong with the grammar; None if it compiles


def frame(message: Compile | Verdict) -> bytes:
    payload = msgspec.json.encode(message)
    return LENGTH.pack(len(payload)) + payload
