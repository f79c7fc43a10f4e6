"""In which API a request is sent, and what is wrong with what its client was told."""

from collections.abc import Iterator

from tests.oracle.http.reading import Whole, differences
from tests.oracle.http.spellings import NAMES, spell
from tests.oracle.requests import DrawnRequest

# Features that no API can say together
OPTIONAL = ("follows", "score_prompt", "reasoning")
# A request that is alone in an engine ends with this error when the engine dies a second time.
ACCUSED = "each time it ran this request"


def sayable(drawn: DrawnRequest) -> tuple[DrawnRequest, str]:
    """The request, without what no API can say, and the API in which it is sent: the drawn one, or
    the next that can say it.
    """
    first = NAMES.index(drawn["api"]) if "api" in drawn else 0
    left = drawn
    for dropped in (None, *OPTIONAL):
        left = left if dropped is None else left.without(dropped)
        for name in NAMES[first:] + NAMES[:first]:
            if spell(left, name) is not None:
                return left, name
    raise AssertionError(f"no API can say {drawn}")


def judged(whole: Whole | None, alone: Whole, has_left: bool, num_kills: int) -> Iterator[str]:
    """What is wrong with what a client was told. `num_kills` is how often the engine was killed."""
    if has_left:
        yield from _begun(whole, alone)
    elif whole is None:
        yield "it has no answer"
    elif whole.error is not None and ACCUSED in whole.error and num_kills >= 2:
        pass
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
