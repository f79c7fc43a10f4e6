"""The same drawn request in all APIs that can say it: they must all tell the same result."""

import random
from collections.abc import Iterator

from tests.oracle.http.check import MENU, HttpOracle
from tests.oracle.http.reading import Whole, differences
from tests.oracle.http.run import Asked
from tests.oracle.http.spellings import APIS, NAMES, spell
from tests.oracle.requests import DrawnRequest, draw_prompts, draw_request

# What Anthropic's API can say, which has no seed
PLAIN = ("max_tokens", "stop", "tools", "reasoning", "adapter", "tenant")


def draw_for_dialects(seed: int) -> DrawnRequest:
    """A request. A third of them are so plain that every API can say them, and a third have several
    choices whose tokens are told.
    """
    rng = random.Random(f"dialects {seed}")
    drawn = draw_request(rng, MENU, draw_prompts(rng, MENU, 1)[0])
    if seed % 3 == 1:
        return drawn.using(n={"n": 2}, logprobs={"logprobs": 1})
    if seed % 3:
        return drawn
    return DrawnRequest(drawn.prompt, {each: drawn[each] for each in PLAIN if each in drawn})


async def dialect_problems(oracle: HttpOracle, drawn: DrawnRequest) -> list[str]:
    """What APIs tell differently of one request, one line for each."""
    found: list[str] = []
    for is_chat in (False, True):
        names = [each for each in NAMES if APIS[each.partition(".")[0]].is_chat == is_chat]
        first: tuple[str, Whole] | None = None
        for name, asked in _asked(drawn, names):
            whole = await oracle.alone(asked)
            if first is None:
                first = name, whole
            if whole.error is not None and first[1].error is not None:
                continue  # each API has its own form of errors
            found += [f"{name}, {first[0]}: {each}" for each in differences(whole, first[1])]
    return found


def _asked(drawn: DrawnRequest, names: list[str]) -> Iterator[tuple[str, Asked]]:
    for name in names:
        # SGLang's answer has the logprobs of the prompt, and not its text.
        is_other = name.startswith("sglang") and "score_prompt" in drawn
        call = None if is_other else spell(drawn, name)
        if call is not None:
            yield name, Asked(name, call, tenant=drawn["tenant"])
