"""Tenants under a flood: one tenant floods the server in every way that it can, and another one
goes on as before.

The flood has many streams, long prompts, and objects that the server stores. The other tenant's
requests are short. None of them may be refused, they get their first token within a few steps of
the busy engine, and what the tenant had stored must stay. A step of many rows takes longer than one
of a request alone, so the time to the first token is counted in the flood's own steps: the time
between two tokens of its streams. When the flooding tenant is refused itself, the
answer tells when to come back; this is compared with what its accepted requests really waited. A
quick run judges no times, because other tests run beside it.
"""

import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import httpx

from benchmarks.prompts import words
from engine.core.key_file import add_key
from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.served_engine import Served, served_engine
from tests.scoreboard.streams import completion

NUM_VICTIM = 30
NUM_STREAMS = 200
STREAM_TOKENS = 48
NUM_LONG = 4
LONG_WORDS = 1500
NUM_STORED = 100
FLOOD_BEGUN_S = 6.0
QUEUE_TIMEOUT_S = 10.0
LIMITS = {
    "LLM_ENGINE_SERVER__QUEUE_TIMEOUT_S": str(QUEUE_TIMEOUT_S),
    "LLM_ENGINE_STORAGE__MAX_RESPONSES": "40",
    "LLM_ENGINE_STORAGE__MAX_SIZE_MB": "2",
}


@figure(
    "R29",
    "tenants under flood",
    minutes=3,
    limits={
        "refused": at_most(0),
        "ttft_steps": at_most(4),
        "objects_lost": at_most(0),
        "retry_after_off_by": at_most(4),
    },
)
def tenants_under_flood(run: Run) -> Values:
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as name:
        path = Path(name) / "keys.json"
        keys = {who: add_key(path, who)[0] for who in ("flood", "victim")}
        admin = add_key(path, "operator", role="admin")[0]
        env = LIMITS | {
            "LLM_ENGINE_SERVER__KEYS_FILE": str(path),
            "LLM_ENGINE_STORAGE__PATH": str(Path(name) / "kept"),
        }
        with served_engine("--log-level", "error", env=env) as served:
            served.headers = {"Authorization": f"Bearer {admin}"}
            spawned = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawned) as apart:
                return asyncio.run(_Flood(run, served, keys, apart).take())


class _Flood:
    def __init__(self, run: Run, served: Served, keys: Mapping[str, str], apart: Executor) -> None:
        self._run = run
        self._apart = apart
        limits = httpx.Limits(max_connections=None)
        self._clients = {
            who: httpx.AsyncClient(
                base_url=served.url,
                headers={"Authorization": f"Bearer {key}"},
                timeout=600.0,
                limits=limits,
            )
            for who, key in keys.items()
        }
        self._stop = asyncio.Event()
        self._told: list[float] = []  # what refusals of the flood said, in seconds
        self._waited: list[float] = []  # seconds to the first tokens of the flood
        self._steps: list[float] = []  # mean seconds between two tokens of each of its streams

    async def take(self) -> Values:
        victim = self._clients["victim"]
        stored = [await victim.post("/v1/conversations", json={}) for _ in range(3)]
        alone, refused = await self._victim("alone")
        flood = [asyncio.create_task(each) for each in self._flood()]
        await asyncio.sleep(FLOOD_BEGUN_S)
        beside, more = await self._victim("beside")
        found = [await victim.get(f"/v1/conversations/{each.json()['id']}") for each in stored]
        self._stop.set()
        await asyncio.gather(*flood)
        for client in self._clients.values():
            await client.aclose()
        self._run.notes |= {
            "victim_ttft_ms": [round(statistics.median(each) * 1e3) for each in (alone, beside)],
            "step_ms": round(statistics.median(self._steps) * 1e3),
            "flood_refused": len(self._told),
            "flood_waited_s": round(max(self._waited, default=0.0), 1),
            "told_s": [min(self._told, default=0.0), max(self._told, default=0.0)],
        }
        steps = statistics.median(beside) / statistics.median(self._steps)
        return {
            "refused": refused + more,
            "ttft_steps": 1.0 if self._run.quick else steps,
            "objects_lost": sum(each.status_code != 200 for each in found),
            "retry_after_off_by": 1.0 if self._run.quick else self._off_by(),
        }

    def _off_by(self) -> float:
        """The factor between the median of what refusals told and the longest real wait. A refused
        request would have waited a little longer than the last one that was accepted.
        """
        if not self._told or not self._waited:
            return 1.0
        told, waited = statistics.median(self._told), max(self._waited)
        return max(told / waited, waited / told)

    def _flood(self) -> list:
        tasks = [self._stream(number) for number in range(self._run.share(NUM_STREAMS, 40))]
        tasks += [self._long(number) for number in range(self._run.share(NUM_LONG, 1))]
        return [*tasks, self._store(), self._upload()]

    async def _victim(self, name: str) -> tuple[list[float], int]:
        """Times to the only token of short requests, and how many were refused."""
        victim = self._clients["victim"]
        count = self._run.share(NUM_VICTIM, 6)
        prompts = [words(12, self._run.seed, name, number) for number in range(count)]
        asked = (str(victim.base_url), victim.headers["authorization"], prompts)
        loop = asyncio.get_running_loop()
        times, failures = await loop.run_in_executor(self._apart, _ask_shortly, *asked)
        self._run.cases += count
        for failure in failures:
            self._run.fail(failure)
        return times, len(failures)

    async def _ask(self, prompt: str, max_tokens: int) -> None:
        began = asyncio.get_running_loop().time()
        body = completion(prompt, max_tokens=max_tokens, priority=-100, stream=True)
        flood = self._clients["flood"]
        async with flood.stream("POST", "/v1/completions", json=body) as answer:
            first_at, last_at, num_texts = None, began, 0
            async for line in answer.aiter_lines():
                if _has_text(line):
                    last_at, num_texts = asyncio.get_running_loop().time(), num_texts + 1
                    first_at = first_at or last_at
        if num_texts > 1 and first_at is not None:
            self._steps.append((last_at - first_at) / (num_texts - 1))
        if answer.status_code == 200 and first_at is not None:
            self._waited.append(first_at - began)
        elif answer.status_code == 429:
            self._told.append(float(answer.headers["retry-after"]))
            await asyncio.sleep(1.0)
        else:
            self._run.fail(f"the flood got {answer.status_code}")

    async def _stream(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            await self._ask(words(30, self._run.seed, "flood", number, turn), STREAM_TOKENS)

    async def _long(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            await self._ask(words(LONG_WORDS, self._run.seed, "long", number, turn), 1)

    async def _store(self) -> None:
        for _ in range(self._run.share(NUM_STORED, 60)):
            answer = await self._clients["flood"].post("/v1/conversations", json={})
            if answer.status_code not in (200, 507):
                self._run.fail(f"a conversation got {answer.status_code} {answer.text}")

    async def _upload(self) -> None:
        for _ in range(self._run.share(NUM_STORED, 20)):
            files = {"file": ("in.jsonl", b"x" * 65_536, "application/json")}
            form = {"purpose": "batch"}
            answer = await self._clients["flood"].post("/v1/files", data=form, files=files)
            if answer.status_code not in (200, 413, 507):
                self._run.fail(f"a file got {answer.status_code} {answer.text}")


def _ask_shortly(url: str, authorization: str, prompts: list[str]) -> tuple[list[float], list[str]]:
    """Asks one after the other. This runs in a process of its own, because the clients of the flood
    keep theirs busy.
    """
    times, failures = [], []
    headers = {"Authorization": authorization}
    with httpx.Client(base_url=url, headers=headers, timeout=600.0) as client:
        for prompt in prompts:
            began = time.monotonic()
            answer = client.post("/v1/completions", json=completion(prompt, max_tokens=1))
            times.append(time.monotonic() - began)
            if answer.status_code != 200:
                failures.append(f"{answer.status_code} {answer.text}")
    return times, failures


def _has_text(line: str) -> bool:
    """Whether a line of a stream has a token. A stream may open with a chunk that has none."""
    if not line.startswith("data: {"):
        return False
    return any(choice["text"] for choice in json.loads(line[6:])["choices"])
