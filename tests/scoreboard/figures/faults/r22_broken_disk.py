"""The server's disk becomes full, deleted, corrupted and read-only while it serves: first the
stored responses, then the disk tier of the prefix cache, then the caches for the next start (packed
weights, tokenizer).

Requests that store nothing must not notice. Requests that store get a well-formed error, and once
the disk works again, stored responses can be read again. To test the start caches, the engine is
killed in each state while it is idle; any other restart is a fault. Mapped files are corrupted only
before such a start: whatever can write into a process's memory can change its answers anyway.
"""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.core.folders import store_directory
from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.loads.disk import TROUBLES, NotPossibleError, Trouble, full
from tests.scoreboard.loads.http import judge_all, post, send
from tests.scoreboard.served_engine import Served, served_engine
from tests.scoreboard.streams import MODEL, Reply, completion

NUM_CLIENTS = 8
ROUNDS = 10
STORY = "All day long the boats went down the river, and the children counted them. " * 4
ENDS = ("The sky is", "Two and two are", "In the beginning", "My name is")
PROMPTS = tuple(f"{index} {STORY}{end}" for index, end in enumerate(ENDS))
STORED_S = 0.5  # the time in which the writing thread stores the blocks of a request
RESPONSES = "/v1/responses"
KEPT = ("packed", "text", "validated")
RESTART_S = 60.0


@figure(
    "R22",
    "stored data, a cache tier and caches full, deleted, corrupted, read-only",
    minutes=2,
    limits={
        "failed_requests": at_most(0),
        "wrong_outputs": at_most(0),
        "engine_restarts": at_most(0),
    },
)
def broken_disk(run: Run) -> Values:
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as name:
        cache = Path(name) / "engine"
        cache.mkdir(mode=0o700)
        models = store_directory()
        (cache / "models").symlink_to(models)
        if run.quick:  # without the cached files of earlier starts, a start takes longer
            for part in KEPT:
                if (models.parent / part).is_dir():
                    (cache / part).symlink_to(models.parent / part)
        env = {"XDG_CACHE_HOME": name, "LLM_ENGINE_STORAGE__PATH": str(Path(name) / "stored")}
        tier, config = Path(name) / "kv", Path(name) / "engine.toml"
        tier.mkdir(mode=0o700)
        config.write_text(f'[cache.tiers]\ndisk_path = "{tier}"\n')
        with served_engine("--log-level", "error", "--config", str(config), env=env) as served:
            return asyncio.run(_Measurement(run, served).take(Path(name) / "stored", tier, cache))


class _Measurement:
    def __init__(self, run: Run, served: Served) -> None:
        self._run = run
        self._served = served
        self._expected: dict[str, str] = {}
        self._wrong_outputs = 0
        self._num_kills = 0

    async def take(self, stored: Path, tier: Path, cache: Path) -> Values:
        await self._ask_all()
        await self._store_and_read("before")
        for trouble in TROUBLES:
            with self._if_possible(trouble.__name__):
                with trouble(self._served, stored, self._run.random("disk", trouble.__name__)):
                    await self._ask_all()
                    await self._try_to_store(trouble.__name__)
                await self._store_and_read(trouble.__name__)
                await self._use_tier_in(trouble, tier)
                if not self._run.quick:
                    await self._start_engine_in(trouble, cache)
        samples = self._served.samples()
        restarts = samples["engine_restarts_total"] - self._num_kills
        if not (saved := samples["engine_cache_tier_saved_tokens_total"]):
            self._run.fail("no request took a block from the tier")
        self._run.notes["tokens_from_the_tier"] = saved
        return {
            "failed_requests": len(self._run.failures),
            "wrong_outputs": self._wrong_outputs,
            "engine_restarts": restarts,
        }

    @contextlib.contextmanager
    def _if_possible(self, name: str) -> Iterator[None]:
        try:
            yield
        except NotPossibleError:
            self._run.notes[name] = "can't be made here"

    async def _use_tier_in(self, trouble: Trouble, tier: Path) -> None:
        """Blocks come from the tier before and after the trouble, and whatever is left of them
        during it.
        """
        for with_trouble in (False, True, False):
            chooser = self._run.random("tier", trouble.__name__)
            broken = trouble(self._served, tier, chooser) if with_trouble else None
            with broken or contextlib.nullcontext():
                for _ in range(self._run.share(2, 1)):
                    reply = await post(self._served, {}, "/v1/admin/cache/flush")
                    if reply.status != 200:
                        self._run.fail(f"flush: {reply.status} {reply.problem}")
                    await self._ask_all()
                    await asyncio.sleep(STORED_S)

    async def _start_engine_in(self, trouble: Trouble, cache: Path) -> None:
        with contextlib.ExitStack() as troubles:
            for part in (cache / name for name in KEPT if (cache / name).exists()):
                chooser = self._run.random("cache", part.name, trouble.__name__)
                troubles.enter_context(trouble(self._served, part, chooser))
            if trouble is not full:  # a process that starts later would not have this limit
                os.kill(self._served.engine_pid(), signal.SIGKILL)
                self._num_kills += 1
                self._served.wait_until(lambda: self._served.health() == 503)
                self._served.wait_until(lambda: self._served.health() == 200, RESTART_S)
            await self._ask_all()

    async def _ask_all(self) -> None:
        """Send the requests that store nothing, or that do not insist on it."""
        for _ in range(self._run.share(ROUNDS, 1)):
            clients = range(self._run.share(NUM_CLIENTS, 4))
            await asyncio.gather(*(self._ask(number) for number in clients))

    async def _ask(self, number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        if number % 2:
            reply = await post(self._served, completion(prompt, max_tokens=8, stream=True))
            judge_all([reply])
            text = reply.texts.get(0) if reply.is_whole else None
        else:
            reply = await post(self._served, _response(prompt), RESPONSES)
            text = _output(reply)
        self._run.cases += 1
        if text is None:
            self._run.fail(f"{reply.status} {reply.problem or reply.body[:200]!r}")
        elif self._expected.setdefault(f"{number % 2} {prompt}", text) != text:
            self._wrong_outputs += 1

    async def _try_to_store(self, trouble: str) -> None:
        """Storing must work, or be refused with a well-formed error."""
        reply = await post(self._served, _response(PROMPTS[0], store=True), RESPONSES)
        self._run.cases += 1
        self._run.notes[f"store_while_{trouble}"] = reply.status
        if reply.status != 200:
            judge_all([reply])
            if reply.status not in (503, 507) or not reply.is_well_formed:
                self._run.fail(f"{trouble}: {reply.status} {reply.problem or reply.body[:200]!r}")

    async def _store_and_read(self, trouble: str) -> None:
        """Store and read on a restored disk. The first attempt may be what detects the damage."""
        for _ in range(2):
            reply = await post(self._served, _response(PROMPTS[0], store=True), RESPONSES)
            if reply.status == 200:
                break
        self._run.cases += 1
        if (text := _output(reply)) is None:
            self._run.fail(f"after {trouble}: {reply.status} {reply.body[:200]!r}")
            return
        kept = await send(self._served, _get(f"{RESPONSES}/{_json(reply)['id']}"))
        if _output(kept) != text:
            self._wrong_outputs += 1
            self._run.notes[f"read_after_{trouble}"] = kept.status


def _response(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": prompt, "temperature": 0, "max_output_tokens": 16} | fields


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


def _output(reply: Reply) -> str | None:
    if reply.problem is not None or reply.status != 200:
        return None
    (message,) = _json(reply)["output"]
    return str(message["content"][0]["text"])


def _json(reply: Reply) -> Any:
    return json.loads(reply.body)
