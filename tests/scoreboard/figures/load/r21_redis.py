"""The Redis that counts rate limits and is a tier of the prefix cache is killed, restarted, frozen,
replaced by one that sends garbage, and restored, all under load.

A client far from its limits must not notice: every request gets the same text, hardly later. A
client with a limit is held to it all the time, by Redis's counts or by the server's own. Recovery
is measured until a Redis that started empty has counts again. The KV pool is emptied again and
again, so that requests need the tier.
"""

import asyncio
import secrets
import signal
import tempfile
import time
from pathlib import Path

from engine.core.key_file import add_key
from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.loads.http import judge_all, post
from tests.scoreboard.loads.redis import PROGRAM, RedisProcess, nonsense, redis
from tests.scoreboard.served_engine import Served, percentile, served_engine
from tests.scoreboard.streams import Reply, completion

PHASE_S = 15.0  # the server retries Redis every five seconds
NUM_CLIENTS = 4
LIMIT = 5  # requests per minute
NUM_ASKED = 8
MOST_REUSE_S = 60.0
PHASES = ("well", "killed", "back", "frozen", "nonsense", "back again")
ADMIN_KEY = secrets.token_hex(16)
AS_ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
FLUSH_EVERY_S = 0.5
STORY = "All day long the boats went down the river, and the children counted them. " * 8
ENDS = ("The sky is", "Two and two are", "In the beginning", "My name is", "Once upon a time")
PROMPTS = tuple(f"{index} {STORY}{end}" for index, end in enumerate(ENDS))


@figure(
    "R21",
    "Redis with counters and a cache tier: killed, frozen, talking nonsense, and back",
    minutes=2,
    limits={
        "failed_requests": at_most(0),
        "added_p99_ttft_ms": at_most(250),
        "wrong_outputs": at_most(0),
        "wrong_limits": at_most(0),
        "time_to_reuse_s": at_most(30),
    },
    in_quick=False,
)
def broken_redis(run: Run) -> Values:
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as name, redis(Path(name)) as counts:
        keys = Path(name) / "keys.json"
        free = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9}
        limited = {"requests_per_minute": LIMIT}
        known = {"free": add_key(keys, "free", limits=free)[0]} | {
            phase: add_key(keys, phase.replace(" ", "-"), limits=limited)[0] for phase in PHASES
        }
        env = {
            "LLM_ENGINE_SERVER__KEYS_FILE": str(keys),
            "LLM_ENGINE_LIMITS__REDIS_URL": counts.url,
            # In a database of its own, because recovery is told by the number of counters.
            "LLM_ENGINE_TIERS__REDIS_URL": counts.url.removesuffix("/0") + "/1",
            "LLM_ENGINE_ADMIN_KEY": ADMIN_KEY,
        }
        with served_engine("--log-level", "error", env=env) as served:
            served.headers = AS_ADMIN
            return asyncio.run(_Measurement(run, served, counts, known).take())


class _Measurement:
    def __init__(
        self, run: Run, served: Served, counts: RedisProcess, keys: dict[str, str]
    ) -> None:
        self._run = run
        self._served = served
        self._redis = counts
        self._keys = keys
        self._expected: dict[str, str] = {}
        self._ttft: dict[str, list[float]] = {}
        self._wrong_outputs = 0
        self._wrong_limits = 0
        self._reuse_s: list[float] = []

    async def take(self) -> Values:
        await self._phase("well")
        self._redis.kill()
        await self._phase("killed")
        await self._come_back("back")
        self._redis.signal(signal.SIGSTOP)
        await self._phase("frozen")
        self._redis.signal(signal.SIGCONT)
        self._redis.kill()
        with nonsense(self._redis.port, self._run.seed) as asked:
            await self._phase("nonsense")
        await self._come_back("back again")
        if asked[0] == 0:
            self._run.fail("nobody asked the one that talks nonsense")
        if not (saved := self._served.samples()["engine_cache_tier_saved_tokens_total"]):
            self._run.fail("no request took a block from the tier")
        p99 = {phase: percentile(times, 0.99) for phase, times in self._ttft.items()}
        self._run.notes |= {
            "redis": "the real one" if PROGRAM else "a stand-in",
            "tokens_from_the_tier": saved,
            "p99_ttft_ms": {phase: round(seconds * 1e3, 1) for phase, seconds in p99.items()},
        }
        return {
            "failed_requests": len(self._run.failures),
            "added_p99_ttft_ms": (max(p99.values()) - p99["well"]) * 1e3,
            "wrong_outputs": self._wrong_outputs,
            "wrong_limits": self._wrong_limits,
            "time_to_reuse_s": max(self._reuse_s),
        }

    async def _come_back(self, phase: str) -> None:
        self._redis.start()
        reused = asyncio.create_task(self._until_reused())
        await self._phase(phase, reused)
        self._reuse_s.append(await reused)

    async def _until_reused(self) -> float:
        began = time.monotonic()
        while time.monotonic() - began < MOST_REUSE_S:
            if await asyncio.to_thread(self._redis.num_names) > 0:
                return time.monotonic() - began
            await asyncio.sleep(0.1)
        return float("inf")

    async def _phase(self, phase: str, reused: asyncio.Task[float] | None = None) -> None:
        until = time.monotonic() + PHASE_S
        clients = [
            asyncio.create_task(self._client(number, until)) for number in range(NUM_CLIENTS)
        ]
        flushing = asyncio.create_task(self._keep_flushing())
        await asyncio.sleep(PHASE_S / 2)
        if reused is not None:
            await reused  # from then on, Redis counts again
        await self._try_limit(phase)
        replies = [reply for each in await asyncio.gather(*clients) for reply in each]
        flushing.cancel()
        self._ttft[phase] = [reply.first_s for reply in replies]

    async def _keep_flushing(self) -> None:
        """Empty the KV pool, so that blocks come from the tier if it has them."""
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            reply = await post(self._served, {}, "/v1/admin/cache/flush", headers=AS_ADMIN)
            if reply.status != 200:
                self._run.fail(f"flush: {reply.status} {reply.problem}")

    async def _try_limit(self, phase: str) -> None:
        statuses = [(await self._ask(phase, PROMPTS[0])).status for _ in range(NUM_ASKED)]
        self._run.cases += NUM_ASKED
        if statuses != [200] * LIMIT + [429] * (NUM_ASKED - LIMIT):
            self._wrong_limits += 1
            self._run.notes[f"statuses_while_{phase}"] = statuses

    async def _client(self, number: int, until: float) -> list[Reply]:
        replies = []
        while time.monotonic() < until:
            prompt = PROMPTS[(number + len(replies)) % len(PROMPTS)]
            reply = await self._ask("free", prompt)
            replies.append(reply)
            self._run.cases += 1
            judge_all([reply])
            if not reply.is_whole:
                self._run.fail(f"{reply.status} {reply.problem or reply.error}")
            elif self._expected.setdefault(prompt, reply.texts[0]) != reply.texts[0]:
                self._wrong_outputs += 1
        return replies

    async def _ask(self, key: str, prompt: str) -> Reply:
        body = completion(prompt, max_tokens=8, stream=True)
        return await post(
            self._served, body, headers={"Authorization": f"Bearer {self._keys[key]}"}
        )
