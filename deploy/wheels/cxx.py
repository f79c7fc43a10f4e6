#!/usr/bin/env python3
"""C++ compiler for portable wheels: `zig c++` for the target in `$ENGINE_ZIG_TARGET`.

It is called in place of g++. Zig has the headers of old C libraries and its own libc++, which it
links statically. It spells processors in a way of its own, so `-march=armv8.2-a+dotprod+fp16`
becomes `-mcpu=generic+v8_2a+dotprod+fullfp16`, and `-mtune` is dropped.
"""

import os
import re
import sys
from pathlib import Path

import ziglang

# Debian's pyconfig.h includes the one of its processor from here. Zig's own headers come first.
SYSTEM_HEADERS = ("-idirafter", "/usr/include")
FEATURES = {"fp16": "fullfp16"}


def translate(argument: str) -> list[str]:
    if argument.startswith("-mtune="):
        return []
    match = re.fullmatch(r"-march=armv8\.(\d)-a((?:\+\w+)*)", argument)
    if match is None:
        return [argument]
    features = [FEATURES.get(name, name) for name in match[2].split("+")[1:]]
    return ["-mcpu=" + "+".join(["generic", f"v8_{match[1]}a", *features])]


def main() -> None:
    zig = str(Path(ziglang.__file__).parent / "zig")
    arguments = [each for argument in sys.argv[1:] for each in translate(argument)]
    target = os.environ["ENGINE_ZIG_TARGET"]
    os.execv(zig, [zig, "c++", "-target", target, *SYSTEM_HEADERS, *arguments])


if __name__ == "__main__":
    main()
