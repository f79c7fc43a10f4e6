"""Checks in a child process with limits that clients' grammars compile.

One child process compiles one grammar after the other. A grammar that exceeds the limit of CPU time
or memory is refused, and a new child is started for the next grammar. If the child does not answer
in time, or was killed for another reason, for example by the OOM killer, the grammar is tried once
more. A check continues when its caller is cancelled, so its result is kept even if the client
disconnects.
"""

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable
from typing import TypeVar

import msgspec

from engine.core.errors import InvalidRequestError, RateLimitError, UnavailableError
from engine.core.grammar.wire import LENGTH, Compile, Verdict, frame
from engine.core.sandbox.liveness import Silence
from engine.core.sandbox.processes import KILLED_WITHIN_S

# Seconds for which a child may do nothing while it compiles a grammar, and while it starts. Seconds
# in which it waits for a processor do not count. Its CPU time has a limit of its own.
COMPILE_TIMEOUT_S = 1.0
START_TIMEOUT_S = 30.0
LOOK_S = 0.2  # between two looks at a child that has not answered
MAX_VERDICTS = 1024
MAX_WAITING = 64
MAX_ANSWER_BYTES = 1 << 16

TOO_SLOW = "takes too long to compile; simplify it"
TOO_LARGE = "needs too much memory or nesting to compile; simplify it"


Result = TypeVar("Result")


class _Stopped(Exception):
    """The child was killed before it answered. The grammar may not be the cause."""


class GrammarChecker:
    """Checks whether grammars compile. Results of recent checks are kept. Other grammars are sent
    to the child process, which is started on first use.
    """

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._checks: dict[bytes, asyncio.Task[str | None]] = {}
        self._turn = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._restart: asyncio.Task[None] | None = None

    async def check(self, grammar: str, param: str) -> None:
        """Raise `InvalidRequestError` unless the grammar compiles within the limits."""
        key = hashlib.sha256(grammar.encode()).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            problem = self._verdicts[key]
        else:
            problem = await asyncio.shield(self._check_for(key, grammar))
        if problem is not None:
            raise InvalidRequestError(f"{param}: the grammar {problem}.", param=param)

    async def close(self) -> None:
        for check in list(self._checks.values()):
            check.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await check
        if self._restart is not None:
            self._restart.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restart
        await self._end_child()

    @property
    def num_verdicts(self) -> int:
        return len(self._verdicts)

    @property
    def child_pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def _check_for(self, key: bytes, grammar: str) -> asyncio.Task[str | None]:
        """The running check of this grammar. If there is none, a new check is started."""
        check = self._checks.get(key)
        if check is None:
            if len(self._checks) >= MAX_WAITING:
                raise RateLimitError(
                    "Too many grammars are waiting to be compiled; try again.", retry_after=1.0
                )
            check = asyncio.create_task(self._verdict(key, grammar))
            self._checks[key] = check
            check.add_done_callback(lambda _: self._checks.pop(key))
        return check

    async def _verdict(self, key: bytes, grammar: str) -> str | None:
        async with self._turn:
            try:
                problem = await self._ask(grammar)
            except _Stopped:
                problem = await self._ask_again(grammar)
        if self._child is None:
            self._restart = asyncio.create_task(self._get_ready())
        self._verdicts[key] = problem
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return problem

    async def _ask_again(self, grammar: str) -> str | None:
        try:
            return await self._ask(grammar)
        except _Stopped:
            raise UnavailableError(
                "The process that checks grammars is stopped again and again; try later.",
                retry_after=1.0,
            ) from None

    async def _ask(self, grammar: str) -> str | None:
        child = await self._running_child()
        assert child.stdin is not None
        try:
            child.stdin.write(frame(Compile(grammar)))
            answer = await answer_of(self._read(child), child.pid, COMPILE_TIMEOUT_S)
        except TimeoutError:
            await self._end_child()
            raise _Stopped from None
        except (asyncio.IncompleteReadError, ConnectionError):
            # The exit status tells which limit the child exceeded.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), COMPILE_TIMEOUT_S)
            await self._end_child()
            if child.returncode == -signal.SIGKILL:
                raise _Stopped from None
            return TOO_SLOW if child.returncode == -signal.SIGPROF else TOO_LARGE
        except BaseException:
            await self._end_child()
            raise
        return None if answer.problem is None else f"cannot be used: {answer.problem}"

    async def _get_ready(self) -> None:
        """Start a child for the next check, so that the check does not wait for the start."""
        async with self._turn:
            with contextlib.suppress(UnavailableError):  # the next check reports the failure
                await self._running_child()

    async def _running_child(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "engine.core.grammar.child", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            await answer_of(self._read(self._child), self._child.pid, START_TIMEOUT_S)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await self._end_child()
            raise UnavailableError(
                "The process that checks grammars does not start; look at the server's memory."
            ) from error
        except BaseException:
            await self._end_child()
            raise
        return self._child

    async def _read(self, child: asyncio.subprocess.Process) -> Verdict:
        assert child.stdout is not None
        (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
        assert length <= MAX_ANSWER_BYTES
        return msgspec.json.decode(await child.stdout.readexactly(length), type=Verdict)

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # it waits in the kernel, and is left behind
            await asyncio.wait_for(child.wait(), KILLED_WITHIN_S)


async def answer_of(work: Awaitable[Result], pid: int, max_idle_s: float) -> Result:
    """Wait for what a process does. Raises `TimeoutError` if the process has been stopped, or has
    slept, for `max_idle_s` seconds, or if it has computed for very long.
    """
    working = asyncio.ensure_future(work)
    began_at, silence = time.monotonic(), Silence(pid)
    try:
        while not working.done():
            await asyncio.wait([working], timeout=min(LOOK_S, max_idle_s))
            if silence.counted(time.monotonic() - began_at) > max_idle_s and not working.done():
                raise TimeoutError
        return working.result()
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([working], timeout=LOOK_S)
