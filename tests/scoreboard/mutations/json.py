"""Mutations of JSON that keep it valid JSON."""

import copy
import random
from collections.abc import Iterator
from typing import Any

MAX_LISTED = 12  # considered members per list or object: a vocabulary has thousands of similar ones
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**40, 2**63, 2**64, 10**400),
    *(1.5, -0.0, 1e308, 5e-324, float("nan"), float("inf")),
    *("", "x", "▁", "\0", "\ud800", "é" * 1000, "../../x", "<s>", "{{ messages }}", "{% for"),
    *([], {}, [None], [[]], {"type": "x"}, [1, "x"], {"x": {"x": {"x": {}}}}, ["a"] * 2000),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    members: list[Any] = []
    if isinstance(value, dict):
        members = list(value)
    elif isinstance(value, list):
        members = list(range(len(value)))
    half = MAX_LISTED // 2
    for key in members if len(members) <= MAX_LISTED else members[:half] + members[-half:]:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def damage(rng: random.Random, value: Any, junk: tuple[Any, ...] = JUNK) -> None:
    """Make one change somewhere within an object, in place."""
    everywhere = list(places(value))
    if not everywhere:
        return
    *path, last = rng.choice(everywhere)
    for key in path:
        value = value[key]
    match rng.randrange(8):
        case 0:
            del value[last]
        case 1 if isinstance(value, list):
            value.insert(last, copy.deepcopy(rng.choice(value)))
        case 1 if isinstance(value, dict):
            value[rng.choice(("", "x", str(last).upper(), str(last) + " "))] = value[last]
        case 2:
            other = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
            value[last], value[other] = value[other], value[last]
        case 3 | 4 if isinstance(value[last], (int, float)) and not isinstance(value[last], bool):
            value[last] = value[last] + rng.choice((-1, 1, 1000, 2**20, 2**23, 2**31))
        case 5 if isinstance(value[last], str):
            text = value[last]
            at = rng.randrange(len(text) + 1)
            value[last] = (
                text[:at] + rng.choice(("", "\0", "é", "(", "[", "\\", " ")) + text[at + 1 :]
            )
        case _:
            value[last] = copy.deepcopy(rng.choice(junk))
