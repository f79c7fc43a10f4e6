"""R31: hostile requests for every route, of every dialect, harm nobody but themselves.

Several clients send them at once. Meanwhile clients of another tenant repeat known requests, and
the lives of the server and its engine are watched.
"""

import asyncio
import atexit
import contextlib
import sys
from collections.abc import Iterator
from functools import cache

from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.hostile.victim import Victim, attacked_server
from tests.scoreboard.hostile.watch import NUM_INNOCENT, Innocent, Watch

NUM_CASES, NUM_CLIENTS = 9_000, 8
NUM_SEEING = 1_000  # cases for a model that sees images
SEEING_BIT = 1 << 48  # in the seeds of these
NUM_CANDIDATES = 4  # seeds, of which the one that meets most new pairs of fields is used
WARM_UP_SHARE = 0.1  # of the cases: memory that the server keeps for good is allocated in them
MAX_GROWTH_MIB = 512
IDLE_WITHIN_S = 120.0
PROGRESS_EVERY = 250
KINDS = {"hung": "hung", "large error": "errors_over_8_kb", "server error": "server_errors"}


class Attack:
    """Sends the cases of a run from several clients, and collects what is wrong."""

    def __init__(self, run: Run, victim: Victim) -> None:
        self._run = run
        self._victim = victim
        self._sees = victim.generator.known.sees
        self._seeds = run.random("cases", self._sees)
        self._unmet = victim.generator.pairs()
        self.num_pairs = len(self._unmet)
        self.counts = dict.fromkeys(KINDS.values(), 0)

    @property
    def num_met(self) -> int:
        return self.num_pairs - len(self._unmet)

    async def send(self, count: int) -> None:
        numbers = iter(range(count))
        num_clients = self._run.share(NUM_CLIENTS, quick=2)
        await asyncio.gather(*(self._send_some(numbers) for _ in range(num_clients)))

    async def _send_some(self, numbers: Iterator[int]) -> None:
        for _ in numbers:
            seed = self._next_seed()
            hostile = self._victim.generator.request(seed)
            problem = await self._victim.throw(hostile)
            self._run.cases += 1
            if problem is not None:
                self.counts[KINDS[problem.partition(":")[0]]] += 1
                self._run.fail(f"{hostile.route} {hostile.manner}: {problem}", seed)
            if self._run.cases % PROGRESS_EVERY == 0 and not self._run.quick:
                self._tell()

    def _next_seed(self) -> int:
        mark = SEEING_BIT if self._sees else 0
        candidates = [self._seeds.getrandbits(48) | mark for _ in range(NUM_CANDIDATES)]
        generator = self._victim.generator
        best = max(candidates, key=lambda seed: len(generator.met_by(seed) & self._unmet))
        self._unmet -= generator.met_by(best)
        return best

    def _tell(self) -> None:
        told = f"{self._run.cases} cases, {len(self._run.failures)} failures"
        print(f"{told}, {self.num_met} of {self.num_pairs} pairs", file=sys.stderr, flush=True)


async def attack(run: Run, victim: Victim, count: int) -> Values:
    watch = Watch(victim.served, victim.silences)
    served, model = victim.served, victim.generator.known.model
    innocents = [Innocent(served, model, victim.innocent_key, n) for n in range(NUM_INNOCENT)]
    for innocent in innocents:
        await innocent.learn()
    attackers = Attack(run, victim)
    async with asyncio.TaskGroup() as group:
        watching = [group.create_task(each.run()) for each in (watch, *innocents)]
        await attackers.send(int(count * WARM_UP_SHARE))
        before = watch.rss_mib()
        await attackers.send(count - int(count * WARM_UP_SHARE))
        for task in watching:
            task.cancel()
    await asyncio.to_thread(victim.served.wait_until_idle, IDLE_WITHIN_S)
    after = watch.rss_mib()
    harmed = [failure for innocent in innocents for failure in innocent.failures]
    tracebacks = watch.tracebacks()
    for failure in (*watch.failures, *harmed, *tracebacks):
        run.fail(failure)
    _note(run, victim, attackers, watch, innocents)
    return {
        "engine_deaths": watch.engine_deaths,
        "server_deaths": watch.server_deaths,
        "silences": watch.num_silent(),
        "innocent_harmed": len(harmed),
        "tracebacks": len(tracebacks),
        **attackers.counts,
        "server_growth_mib": after[0] - before[0],
        "engine_growth_mib": after[1] - before[1],
    }


def _note(
    run: Run, victim: Victim, attack: Attack, watch: Watch, innocents: list[Innocent]
) -> None:
    """Note facts besides the limits, for each of the two servers."""
    notes = {str(status): n for status, n in sorted(victim.statuses.items())}
    notes |= {
        "pairs_of_fields": attack.num_pairs,
        "pairs_met": attack.num_met,
        "innocent_asked": sum(each.num_asked for each in innocents),
        "longest_silence_s": max(watch.silences(), default=0.0),
        "unhealthy": watch.unhealthy,
    }
    run.notes["with_images" if victim.generator.known.sees else "texts"] = notes


def one_case(seed: int) -> None:
    """Send one request, and then ask for the health of the server."""
    victim = _shared_victim(sees=bool(seed & SEEING_BIT))
    watch = Watch(victim.served, victim.silences)
    hostile = victim.generator.request(seed)
    problem = asyncio.run(victim.throw(hostile))
    assert problem is None, f"{hostile.route}: {problem}"
    victim.served.wait_until_idle(IDLE_WITHIN_S)
    asyncio.run(watch.look_once())
    assert not watch.failures and not watch.unhealthy, watch.failures


@cache
def _shared_victim(*, sees: bool) -> Victim:
    """One server for all seeds that failed once. It ends with this process."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(attacked_server(sees=sees))


@figure(
    "R31",
    "hostile requests, every endpoint and dialect, beside innocent clients",
    minutes=16,
    limits={
        "engine_deaths": at_most(0),
        "server_deaths": at_most(0),
        "silences": at_most(0),
        "innocent_harmed": at_most(0),
        "server_errors": at_most(0),
        "errors_over_8_kb": at_most(0),
        "hung": at_most(0),
        "tracebacks": at_most(0),
        "server_growth_mib": at_most(MAX_GROWTH_MIB),
        "engine_growth_mib": at_most(MAX_GROWTH_MIB),
    },
    case=one_case,
)
def hostile_requests(run: Run) -> Values:
    with attacked_server() as victim:
        values = asyncio.run(attack(run, victim, run.share(NUM_CASES, quick=40)))
    if not run.quick:
        with attacked_server(sees=True) as victim:
            others = asyncio.run(attack(run, victim, NUM_SEEING))
        values = {
            name: max(value, others[name]) if name.endswith("_mib") else value + others[name]
            for name, value in values.items()
        }
    return values
