"""R13: every stage of a request fails once while eight requests are served together."""

import asyncio

from engine.core import faults
from engine.core.faults import Fault
from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.served_engine import WITHOUT_DRAFTS, Served, served_engine
from tests.scoreboard.streams import CHAT, Reply, ask
from tests.support.fakes.staged_requests import staged_body

NUM_CLIENTS = 8
# A fault in these stages fails no request: the stage is repeated, or only a cache entry is lost.
HARMLESS = ("compile", "schedule", "forward", "sample", "wait", "publish")
COSTS_ONE = (
    *("validate", "template", "tokenize", "check_grammar", "submit", "intake"),
    *("allocate", "update", "nonfinite", "detokenize", "parse", "format"),
)
# At which call of a stage the fault is injected. Eight equal grammars are compiled only once.
MOMENTS = (2, 6)
ONCE = ("check_grammar", "compile")


async def ask_all(served: Served) -> list[Reply]:
    return await asyncio.gather(
        *(ask(served, staged_body(n, stream=n % 2 == 0), CHAT) for n in range(NUM_CLIENTS))
    )


def has_struck(served: Served, point: str, replies: list[Reply]) -> bool:
    """Whether the fault was hit: exceptions are in the log, a non-finite row shows by its failed
    request.
    """
    if point == "nonfinite":
        return any(not reply.is_whole for reply in replies)
    return any(f"a fault was planned at {point}" in line for line in served.log)


class Tally:
    def __init__(self, run: Run, expected: list[dict[int, str]]) -> None:
        self._run = run
        self._expected = expected
        self.num_failed = self.num_changed = self.num_unstruck = 0

    def try_stage(self, point: str, at: int) -> None:
        fault = Fault(point, "mark" if point == "nonfinite" else "raise", at=at)
        with served_engine(env=WITHOUT_DRAFTS | faults.environment(fault)) as served:
            replies = asyncio.run(ask_all(served))
            served.wait_until_idle()
            struck = has_struck(served, point, replies)
        self._run.cases += 1
        failed = [reply for reply in replies if not reply.is_whole]
        pairs = zip(replies, self._expected, strict=True)
        changed = [reply for reply, text in pairs if reply.is_whole and reply.texts != text]
        innocent = len(failed) - (point in COSTS_ONE)
        if innocent > 0 or changed or not struck:
            told = [reply.problem or reply.error for reply in failed]
            self._run.fail(f"{point} at {at}: {told}, {len(changed)} changed, struck: {struck}")
        self.num_failed += max(0, innocent)
        self.num_changed += len(changed)
        self.num_unstruck += not struck


@figure(
    "R13",
    "an exception in each stage of eight requests that are served together",
    minutes=3,
    limits={
        "innocent_failed": at_most(0),
        "outputs_changed": at_most(0),
        "stages_not_struck": at_most(0),
    },
    in_quick=False,
)
def stage_faults(run: Run) -> Values:
    with served_engine() as served:
        replies = asyncio.run(ask_all(served))
    assert all(reply.is_whole for reply in replies), [reply.problem for reply in replies]
    tally = Tally(run, [reply.texts for reply in replies])
    for point in HARMLESS + COSTS_ONE:
        for at in (1,) if point in ONCE else MOMENTS:
            tally.try_stage(point, at)
    run.notes["stages"] = len(HARMLESS + COSTS_ONE)
    return {
        "innocent_failed": tally.num_failed,
        "outputs_changed": tally.num_changed,
        "stages_not_struck": tally.num_unstruck,
    }
