"""In which API a request is sent, and what is wrong with what its client was told."""

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from itertools import combinations

from tests.oracle.http.reading import Whole, differences
from tests.oracle.http.spellings import NAMES, spell
from tests.oracle.requests import DrawnRequest

# Features that no API can say together
OPTIONAL = ("follows", "score_prompt", "reasoning", "captures", "steering", "image")
# A request that is alone in an engine ends with this error when the engine dies a second time.
ACCUSED = "each time it ran this request"
LATE = "time limit passed"


def sayable(drawn: DrawnRequest) -> tuple[DrawnRequest, str]:
    """The request, without what no API can say, and the API in which it is sent: the drawn one, or
    the next that can say it.
    """
    wanted = drawn["api"] or NAMES[0]
    first = NAMES.index(wanted)
    names = sorted(
        NAMES[first:] + NAMES[:first], key=lambda each: _streams(each) != _streams(wanted)
    )
    for count in range(len(OPTIONAL) + 1):
        for dropped in combinations(OPTIONAL, count):
            left = reduce(DrawnRequest.without, dropped, drawn)
            for name in names:
                if spell(left, name) is not None:
                    return left, name
    raise AssertionError(f"no API can say {drawn}")


def _streams(name: str) -> bool:
    return name.endswith(".stream")


def judged(
    whole: Whole | None, alone: Whole, has_left: bool, num_kills: int, *, is_limited: bool = False
) -> Iterator[str]:
    """What is wrong with what a client was told. `num_kills` is how often the engine was killed.
    If the request `is_limited`, its time may be over.
    """
    if has_left:
        yield from _begun(whole, alone)
    elif whole is None:
        yield "it has no answer"
    elif whole.error is not None and ACCUSED in whole.error and num_kills >= 2:
        pass
    elif whole.error is not None and LATE in whole.error and is_limited:
        yield from _begun(replace(whole, error=None), alone)
    else:
        yield from differences(whole, alone)


def _begun(whole: Whole | None, alone: Whole) -> Iterator[str]:
    """What a client got before it left is a beginning of the whole answer."""
    if whole is None or whole.error is not None:
        return
    for index, choice in enumerate(whole.choices[: len(alone.choices)]):
        told = alone.choices[index]
        for name in ("text", "reasoning"):
            mine, its = getattr(choice, name) or "", getattr(told, name) or ""
            if not its.startswith(mine):
                yield f"choice {index} {name}: {mine!r} is no beginning of {its!r}"
