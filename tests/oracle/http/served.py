"""Histories over real HTTP on the default model: its engine is killed and stopped while several
clients read, slowly or not, and leave. A second server without a cache answers one request at a
time, and says what each gives alone. The native framework gives the same bits in both.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.oracle.check import Report
from tests.oracle.histories import Event, History, Stage, draw_history
from tests.oracle.http.explained import broken_spans, may_see
from tests.oracle.http.judge import judged, sayable
from tests.oracle.http.keys import ADMIN, KEYS, write_keys
from tests.oracle.http.reading import Whole, parse_reply, read_whole
from tests.oracle.http.spellings import NAMES, WORDS, Call, spell
from tests.oracle.requests import Menu
from tests.scoreboard.served_engine import MODEL, Served, served_engine
from tests.support.files.lora_files import peft_folder

ADAPTERS = ("red", "blue")
MENU = Menu(
    num_words=len(WORDS),
    max_prompt=8,
    max_tokens=16,
    tokens=(28, 198, 260, 282, 253, 339),
    ends=(2,),
    stops=("a", ".", "\n", "the", " b"),
    stop_patterns=("[aeiou]{2}",),
    bad_words=("the", "a"),
    breakers=("\n",),
    grammars=("regex", "choice", "json"),
    num_tools=2,
    adapters=ADAPTERS,
    apis=NAMES,
)
UNLIKE = frozenset(
    ("evict", "flush", "shrink", "grow", "fault", "memory", "nan", "swap", "late")
    + ("tier_lost", "tier_fails")
)
STAGE = Stage(MENU, {}, without=UNLIKE, max_requests=6, max_events=14)
POOL_MB = 16  # room for a few requests, so that some are preempted
SHAPES = {f"model.layers.{layer}.self_attn.q_proj": (576, 576) for layer in (0, 7, 20)}
END_S = 180.0  # within which every request has ended
TURN_S = 2.0  # for which a history waits for the next tokens at most
SLOW_BYTES = 400
MAX_KILLS = 3  # in a minute. After five deaths, restarts pause


@dataclass
class Reading:
    """A client on a connection of its own."""

    name: str  # of the API
    call: Call
    request_id: str
    is_slow: bool
    tenant: str | None
    received: bytearray = field(default_factory=bytearray)
    has_left: bool = False
    problem: str = ""
    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    writer: asyncio.StreamWriter | None = None

    async def run(self, address: tuple[str, int]) -> None:
        try:
            async with asyncio.timeout(END_S):
                reader, self.writer = await asyncio.open_connection(*address)
                self.writer.write(self._request())
                while data := await reader.read(SLOW_BYTES if self.is_slow else 65536):
                    self.received += data
                    if self.is_slow:
                        self.may_read.clear()
                        await self.may_read.wait()
        except (OSError, TimeoutError) as error:
            self.problem = "" if self.has_left else f"{type(error).__name__}: {error}"
        finally:
            if self.writer is not None:
                self.writer.close()

    def _request(self) -> bytes:
        content = json.dumps(self.call.body).encode()
        lines = {
            "Host": "localhost",
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            "Connection": "close",
            "X-Request-Id": self.request_id,
            **self.call.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {self.call.path} HTTP/1.1\r\n{head}\r\n".encode() + content

    def leave(self) -> None:
        if self.writer is not None and not self.writer.is_closing():
            self.has_left = True
            self.writer.transport.abort()
            self.may_read.set()

    @property
    def whole(self) -> Whole | None:
        reply = parse_reply(bytes(self.received))
        return None if reply is None else read_whole(self.name, reply)


class ServedOracle:
    """Checks histories on a server, against a second one."""

    def __init__(self, served: Served, reference: Served) -> None:
        self._served, self._reference = served, reference
        self._alone: dict[str, Whole] = {}
        self._kills: deque[float] = deque(maxlen=MAX_KILLS)
        self._num_histories = 0

    def check(self, history: History) -> Report:
        return asyncio.run(self._check(history))

    async def _check(self, history: History) -> Report:
        self._num_histories += 1
        readings: list[Reading] = []
        for index, drawn in enumerate(history.requests):
            left, name = sayable(drawn.without("follows"))
            call = spell(left, name, MODEL)
            assert call is not None
            request_id = f"history-{self._num_histories}-{index}"
            is_slow = left["reader"] == "slow"
            readings.append(Reading(name, call, request_id, is_slow, left["tenant"]))
        alone = [await self._alone_whole(each) for each in readings]
        seen: Counter[str] = Counter()
        opened = await self._carry_out(history, readings, seen)
        wrong: list[str] = []
        for index in opened:
            told = await self._problems(readings[index], alone[index], seen["kill"])
            wrong += [f"request {index} ({readings[index].name}): {each}" for each in told]
        try:
            await asyncio.to_thread(self._served.wait_until_idle, END_S)
        except AssertionError:
            wrong.append("the engine still works when every client has its answer")
        return Report(wrong, seen)

    async def _carry_out(
        self, history: History, readings: list[Reading], seen: Counter[str]
    ) -> list[int]:
        tasks: dict[int, asyncio.Task[None]] = {}
        for event in history.events:
            match event:
                case ("submit", index):
                    work = readings[index].run(self._served.address)
                    tasks[index] = asyncio.create_task(work)
                case ("turns", count):
                    await self._await_tokens(readings, tasks, count)
                case ("cancel", index):
                    readings[index].leave()
                case _:
                    if not await self._happen(event):
                        continue
            seen[event[0]] += 1
        for each in readings:
            each.is_slow = False
            each.may_read.set()
        await asyncio.gather(*tasks.values())
        return sorted(tasks)

    async def _await_tokens(
        self, readings: list[Reading], tasks: dict[int, asyncio.Task[None]], count: int
    ) -> None:
        """Wait until clients have received more, or all have their answers."""
        wanted = sum(len(each.received) for each in readings) + 200 * count
        until = time.monotonic() + TURN_S
        while time.monotonic() < until and not all(each.done() for each in tasks.values()):
            if sum(len(each.received) for each in readings) >= wanted:
                return
            for each in readings:
                each.may_read.set()
            await asyncio.sleep(0.01)

    async def _happen(self, event: Event) -> bool:
        """An event of the engine. Returns whether it happened."""
        match event:
            case ("kill", _):
                return self._signal(signal.SIGKILL)
            case ("freeze", _):
                return self._signal(signal.SIGSTOP)
            case ("load_adapter", number):
                await self._reload(ADAPTERS[number % len(ADAPTERS)])
            case ("wait", seconds):
                await asyncio.sleep(min(seconds, 0.2))
        return True

    def _signal(self, number: signal.Signals) -> bool:
        now = time.monotonic()
        if len(self._kills) == MAX_KILLS and now - self._kills[0] < 60:
            return False
        with contextlib.suppress(ValueError, ProcessLookupError):  # the next one is not there yet
            os.kill(self._served.engine_pid(), number)
            self._kills.append(now)
            return True
        return False

    async def _reload(self, name: str) -> None:
        """Serve an adapter no longer, and then again. Requests that use it go on."""
        headers = {"authorization": f"Bearer {ADMIN}"}
        async with httpx.AsyncClient(headers=headers, timeout=END_S) as client:
            for path, body in (
                ("unload_lora_adapter", {"lora_name": name}),
                ("load_lora_adapter", {"lora_name": name, "lora_path": adapter_path(name)}),
            ):
                answer = await client.post(f"{self._served.url}/v1/{path}", json=body)
                assert answer.status_code == 200 or "already" in answer.text, answer.text

    async def _alone_whole(self, reading: Reading) -> Whole:
        """What a request gives alone, on a server that has cached nothing."""
        key = json.dumps([reading.name, reading.call.body], sort_keys=True)
        if key not in self._alone:
            alone = Reading(reading.name, reading.call, "alone", False, reading.tenant)
            await alone.run(self._reference.address)
            whole = alone.whole
            assert whole is not None, (alone.problem, reading.call)
            self._alone[key] = whole
        return self._alone[key]

    async def _problems(self, reading: Reading, alone: Whole, num_kills: int) -> list[str]:
        if reading.problem:
            return [reading.problem]
        found = list(judged(reading.whole, alone, reading.has_left, num_kills))
        if reading.has_left or alone.error is not None:
            return found
        async with httpx.AsyncClient(timeout=END_S) as client:
            for who, key in [*KEYS.items(), (None, ADMIN)]:
                answer = await client.get(
                    f"{self._served.url}/v1/admin/requests/{reading.request_id}",
                    headers={"authorization": f"Bearer {key}"},
                )
                if (answer.status_code == 200) != may_see(key, who, reading.tenant):
                    found.append(f"explanation: {key} gets {answer.status_code}")
                elif answer.status_code == 200:
                    found += [f"explanation: {each}" for each in broken_spans(answer.json())]
        return found


_FOLDER = Path(tempfile.gettempdir()) / f"oracle-adapters-{os.getpid()}"


def adapter_path(name: str) -> str:
    folder = _FOLDER / name
    if not folder.exists():
        peft_folder(folder, SHAPES, seed=ADAPTERS.index(name) + 1, std=0.05)
    return str(folder)


@contextmanager
def served_oracle() -> Iterator[ServedOracle]:
    arguments: list[str] = ["--batch-size", "4"]
    for name in ADAPTERS:
        arguments += ["--lora", f"{name}={adapter_path(name)}"]
    with tempfile.TemporaryDirectory() as folder:
        env = {
            "LLM_ENGINE_SERVER__KEYS_FILE": str(write_keys(Path(folder) / "keys.json")),
            "LLM_ENGINE_SERVER__QUEUE_TIMEOUT_S": str(END_S),  # a starved machine is no failure
        }
        small = ("--memory-pool-size-mb", str(POOL_MB))
        with (
            served_engine(*arguments, *small, env=env) as served,
            served_engine(*arguments, "--no-cache", env=env) as reference,
        ):
            served.headers = {"authorization": f"Bearer {ADMIN}"}
            yield ServedOracle(served, reference)


def drawn_history(seed: int) -> History:
    """The history of a seed."""
    return draw_history(random.Random(f"served {seed}"), STAGE)
