"""A server in a process of its own over a backend that figures need: run as a module with settings
in JSON. It prints where it listens, then answers a line of input with a line of output, until its
input ends.

    stalls               the longest pause of its event loop since it was last asked, in seconds
    template "SOURCE"    requests are rendered with this chat template from now on
"""

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.backends.custom.base_custom import CustomBackend
from engine.backends.custom.frameworks.backends import NativeBackend
from engine.core.errors import ModelFormatError
from engine.core.utils.chat_template import ChatTemplate
from tests.conftest import DEFAULT_MODEL
from tests.fake_backend import FakeBackend
from tests.live_server import LiveServer, make_settings

TICK_S = 0.005


class LoopClock:
    """How long the event loop was kept from its work. Time in which other programs had the
    processors is left out: it says nothing about this one.
    """

    def __init__(self, server: LiveServer) -> None:
        self._stat = Path(f"/proc/self/task/{server.thread.native_id}/schedstat")
        self._longest = 0.0
        server._loop.call_soon_threadsafe(self._begin, server._loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._tick(loop, self._now())

    def _now(self) -> float:
        return time.monotonic() - int(self._stat.read_text().split()[1]) / 1e9

    def _tick(self, loop: asyncio.AbstractEventLoop, last: float) -> None:
        now = self._now()
        self._longest = max(self._longest, now - last - TICK_S)
        loop.call_later(TICK_S, self._tick, loop, now)

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
    backend._text = replace(text, template=template)
    return "used"


def main() -> None:
    asked = json.loads(sys.argv[1])
    backend: Any = NativeBackend(DEFAULT_MODEL) if asked.pop("native", False) else FakeBackend()
    server = LiveServer(backend, make_settings(**asked))
    clock = LoopClock(server)
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
