"""R23: one row of eight is not finite. Its request fails, the others are answered as usual, and the
prefix cache gets nothing from the failed row.
"""

import asyncio
import json
from typing import Any

from engine.core import faults
from engine.core.faults import Fault
from tests.scoreboard.figure import Run, Values, at_least, at_most, figure
from tests.scoreboard.served_engine import WITHOUT_DRAFTS, Served, served_engine
from tests.scoreboard.streams import Reply, ask, completion

NUM_ROUNDS, BATCH, BLOCK_SIZE = 20, 8, 16
NUM_TOKENS = 12
# Each round's victim has its own token, which no other request uses or generates.
FIRST_VICTIM = 30_000


def prompt(run: Run, round_number: int, row: int) -> list[int]:
    """A prompt of a few blocks; row 0 is the victim's and starts with its token."""
    rng = run.random("prompt", round_number, row)
    words = [rng.randrange(1000, 20_000) for _ in range(rng.randint(40, 70))]
    return [FIRST_VICTIM + round_number, *words] if row == 0 else words


def body(run: Run, round_number: int, row: int) -> dict[str, Any]:
    fields = {"max_tokens": NUM_TOKENS, "stream": row % 2 == 0}
    return completion("", **fields) | {"prompt": prompt(run, round_number, row)}


def strikes_at(round_number: int) -> int:
    """Which of the victim's rows is made non-finite: its prefill, or a later decode token."""
    return 1 if round_number % 2 == 0 else 2 + round_number % (NUM_TOKENS - 2)


async def ask_round(run: Run, served: Served, round_number: int) -> list[Reply]:
    return await asyncio.gather(
        *(ask(served, body(run, round_number, row)) for row in range(BATCH))
    )


async def cached_of_victim(run: Run, served: Served, round_number: int) -> tuple[Reply, int]:
    """Repeat the victim's request. Returns its reply, and how many of its tokens were cached."""
    asked = body(run, round_number, 0) | {"stream": False}
    reply = await ask(served, asked)
    usage = json.loads(reply.body)["usage"]
    return reply, int(usage["prompt_tokens_details"]["cached_tokens"])


class Tally:
    def __init__(self) -> None:
        self.num_victims_failed = self.num_others = self.num_others_equal = 0
        self.num_blocks_found = 0


async def compare(run: Run, served: Served, peaceful: list[list[Reply]], tally: Tally) -> None:
    for number, expected in enumerate(peaceful):
        victim, *others = await ask_round(run, served, number)
        run.cases += 1
        tally.num_victims_failed += victim.is_well_formed and victim.error is not None
        tally.num_others += len(others)
        tally.num_others_equal += sum(
            reply.is_whole and reply.texts == calm.texts
            for reply, calm in zip(others, expected[1:], strict=True)
        )
        again, num_cached = await cached_of_victim(run, served, number)
        if again.texts != expected[0].texts:
            run.fail(f"round {number}: asked again, the victim is told something else")
        if strikes_at(number) == 1:
            tally.num_blocks_found += num_cached // BLOCK_SIZE


async def all_rounds(run: Run, served: Served) -> list[list[Reply]]:
    return [await ask_round(run, served, number) for number in range(run.share(NUM_ROUNDS))]


@figure(
    "R23",
    "one row of eight that is not finite, in its prompt or later",
    minutes=1,
    limits={
        "victims_failed_percent": at_least(100),
        "others_equal_percent": at_least(100),
        "blocks_found_in_cache": at_most(0),
        "wrong_when_asked_again": at_most(0),
    },
    in_quick=False,
)
def nonfinite_row(run: Run) -> Values:
    with served_engine() as served:
        peaceful = asyncio.run(all_rounds(run, served))
    calm = [reply for replies in peaceful for reply in replies]
    assert all(reply.is_whole for reply in calm), [reply.problem for reply in calm]
    plan = [
        Fault("nonfinite", "mark", at=strikes_at(number), within=FIRST_VICTIM + number)
        for number in range(len(peaceful))
    ]
    tally = Tally()
    with served_engine(env=WITHOUT_DRAFTS | faults.environment(*plan)) as served:
        asyncio.run(compare(run, served, peaceful, tally))
        run.notes["rows_seen"] = served.samples()["engine_nonfinite_rows_total"]
    return {
        "victims_failed_percent": 100 * tally.num_victims_failed / max(1, run.cases),
        "others_equal_percent": 100 * tally.num_others_equal / max(1, tally.num_others),
        "blocks_found_in_cache": tally.num_blocks_found,
        "wrong_when_asked_again": len(run.failures),
    }
