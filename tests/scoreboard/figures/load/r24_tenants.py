"""Two tenants: whether one can detect the other's prompts, and how much one's flood delays the
other.

One tenant sends a prompt. Then the other sends the same prompt and a new one, in random order.
Neither the count of cached tokens nor the time to first token may tell them apart. The statistical
test of times gives a false alarm in one of a hundred runs, so it may be repeated once with other
prompts. Then one tenant floods the server with its own prompts, while the other continues from a
long text that it has used before.
"""

import asyncio
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.prompts import words
from engine.core.key_file import add_key
from tests.scoreboard.figure import Run, Values, at_least, at_most, figure
from tests.scoreboard.loads.http import judge_all, post
from tests.scoreboard.meters import mann_whitney_p
from tests.scoreboard.served_engine import Served, percentile, served_engine
from tests.scoreboard.streams import Reply, completion

NUM_PAIRS = 200
PROMPT_WORDS = 160
CONTROL_EVERY = 5  # how often the first tenant repeats its prompt, which must be told apart
LEAST_P = 0.01
NUM_VICTIM = 40
WARM_WORDS = 1900  # one token each
NUM_FLOODERS = 32
FLOOD_WORDS = 100
FLOOD_TOKENS = 32
FLOOD_BEGUN_S = 5.0


@figure(
    "R24",
    "what tenants learn of each other, and take from each other",
    minutes=5,
    limits={
        "cross_tenant_hits": at_most(0),
        "p_of_times": at_least(LEAST_P),
        "victim_ttft_under_flood": at_most(3),
        "failed": at_most(0),
    },
    in_quick=False,
)
def tenants(run: Run) -> Values:
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as name:
        path = Path(name) / "keys.json"
        keys = {who: add_key(path, who)[0] for who in ("first", "second")}
        admin = add_key(path, "operator", role="admin")[0]
        env = {"LLM_ENGINE_SERVER__KEYS_FILE": str(path)}
        with served_engine("--log-level", "error", env=env) as served:
            served.headers = {"Authorization": f"Bearer {admin}"}
            return asyncio.run(_Measurement(run, served, keys).take())


class _Measurement:
    def __init__(self, run: Run, served: Served, keys: Mapping[str, str]) -> None:
        self._run = run
        self._served = served
        self._keys = keys
        self._num_cached: dict[str, int] = dict.fromkeys(keys, 0)

    async def take(self) -> Values:
        p = await self._times("times")
        if p <= LEAST_P:
            self._run.notes["p_at_first"] = round(p, 4)
            p = await self._times("times again")
        # The cache hits reported to the second tenant, and those that the server counted beyond the
        # first tenant's own.
        counted = self._served.samples()["vllm:prefix_cache_hits_total"]
        hits = max(self._num_cached["second"], counted - self._num_cached["first"])
        alone = await self._victim("alone")
        flood = asyncio.Event()
        flooders = [
            asyncio.create_task(self._flooder(number, flood)) for number in range(NUM_FLOODERS)
        ]
        await asyncio.sleep(FLOOD_BEGUN_S)
        beside = await self._victim("beside")
        flood.set()
        await asyncio.gather(*flooders)
        self._run.notes |= {
            "victim_ttft_ms": [round(statistics.median(each) * 1e3) for each in (alone, beside)],
            "victim_p95_ttft_ms": [round(percentile(each, 0.95) * 1e3) for each in (alone, beside)],
        }
        return {
            "cross_tenant_hits": hits,
            "p_of_times": p,
            "victim_ttft_under_flood": statistics.median(beside) / statistics.median(alone),
            "failed": len(self._run.failures),
        }

    async def _times(self, name: str) -> float:
        """The p-value of the difference in times."""
        known: list[float] = []
        new: list[float] = []
        own: list[float] = []
        order = self._run.random(name)
        for number in range(NUM_PAIRS):
            asked = words(PROMPT_WORDS, self._run.seed, name, number, "asked")
            fresh = words(PROMPT_WORDS, self._run.seed, name, number, "new")
            await self._ask("first", asked)
            pair = [(asked, known), (fresh, new)]
            order.shuffle(pair)
            for prompt, times in pair:
                times.append((await self._ask("second", prompt)).seconds)
            if number % CONTROL_EVERY == 0:
                own.append((await self._ask("first", asked)).seconds)
        self._run.cases += 2 * NUM_PAIRS
        self._run.notes["p_of_own_prompts"] = mann_whitney_p(own, new)
        return mann_whitney_p(known, new)

    async def _victim(self, name: str) -> list[float]:
        """Times to first token after a cached text."""
        text = words(WARM_WORDS, self._run.seed, "warm")
        await self._ask("second", text)
        times = []
        for number in range(NUM_VICTIM):
            prompt = f"{text} {words(8, self._run.seed, name, number)}"
            times.append((await self._ask("second", prompt)).seconds)
            self._run.cases += 1
        return times

    async def _flooder(self, number: int, stop: asyncio.Event) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            prompt = words(FLOOD_WORDS, self._run.seed, "flood", number, turn)
            await self._ask("first", prompt, FLOOD_TOKENS)

    async def _ask(self, who: str, prompt: str, max_tokens: int = 1) -> Reply:
        """Send a request. With one output token, the answer is complete with its first token."""
        headers = {"Authorization": f"Bearer {self._keys[who]}"}
        reply = await post(self._served, completion(prompt, max_tokens=max_tokens), headers=headers)
        judge_all([reply])
        if not reply.is_whole:
            self._run.fail(f"{reply.status} {reply.problem or reply.error}")
        else:
            usage = json.loads(reply.body)["usage"]
            self._num_cached[who] += usage["prompt_tokens_details"]["cached_tokens"]
        return reply
