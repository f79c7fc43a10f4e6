"""A server in a separate process over a backend for figures. Run it as a module with JSON settings.

It prints its address, then answers each line of input with a line of output, until its input ends:

    stalls               the longest pause of its event loop since the last query, in seconds
    template "SOURCE"    requests are rendered with this chat template from now on
"""

import asyncio
import gc
import json
import sys
import time
from dataclasses import replace
from typing import Any

from engine.backends.custom.base_custom import CustomBackend
from engine.backends.custom.frameworks import NativeBackend
from engine.core.errors import ModelFormatError
from engine.core.text.chat_template import ChatTemplate
from tests.conftest import DEFAULT_MODEL
from tests.scoreboard.meters import queued_ns
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.servers.live_server import LiveServer, make_settings, wait_until

TICK_S = 0.005


class LoopClock:
    """Measures how long the event loop was blocked, by itself or by a thread that held the GIL.
    Time in which other programs used the CPU is subtracted.
    """

    def __init__(self, server: LiveServer) -> None:
        self._longest = 0.0
        server._loop.call_soon_threadsafe(self._tick, server._loop, time.monotonic(), queued_ns())

    def _tick(self, loop: asyncio.AbstractEventLoop, last: float, before: dict[str, int]) -> None:
        now, queued = time.monotonic(), queued_ns()
        waited = sum(ns - before.get(thread, ns) for thread, ns in queued.items()) / 1e9
        self._longest = max(self._longest, now - last - TICK_S - waited)
        loop.call_later(TICK_S, self._tick, loop, time.monotonic(), queued)

    def longest(self) -> float:
        longest, self._longest = self._longest, 0.0
        return longest


def use_template(backend: Any, source: str) -> str:
    assert isinstance(backend, CustomBackend)
    text = backend._text
    assert text is not None
    try:
        template = ChatTemplate(source, text.tokenizer.bos, text.tokenizer.eos)
    except ModelFormatError:
        return "refused"
    backend._text = replace(text, chat=replace(text.chat, template=template))
    return "used"


def main() -> None:
    asked = json.loads(sys.argv[1])
    backend: Any = NativeBackend(DEFAULT_MODEL) if asked.pop("native", False) else FakeBackend()
    server = LiveServer(backend, make_settings(**asked))
    clock = LoopClock(server)
    wait_until(lambda: backend.health().ready, 60)
    gc.collect()
    gc.freeze()  # as `engine serve` does when it is ready
    print(server.url, flush=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "stalls":
            print(clock.longest(), flush=True)
        else:
            print(use_template(backend, json.loads(argument)), flush=True)
    server.stop()


if __name__ == "__main__":
    main()
