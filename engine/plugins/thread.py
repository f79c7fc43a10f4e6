"""A thread with an event loop of its own, where one plugin's code runs.

Whatever a plugin does there, also sleeping or computing without end, the server's loop goes on. A
call that is late is given up; code that can't be cancelled keeps this thread, and nothing else.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

JOIN_S = 1.0


class PluginThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"plugin-{name}", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
        """What `function` returns, awaited if need be. Raises what it raises, or `TimeoutError`."""
        running = asyncio.run_coroutine_threadsafe(_run(function, arguments), self._loop)
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(running)

    def stop(self) -> None:
        """Returns soon, whether the thread has ended or is stuck."""
        with contextlib.suppress(RuntimeError):  # stopped already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


async def _run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        made = function(*arguments)
        return await made if isinstance(made, Awaitable) else made
    except Exception:
        raise
    except BaseException as error:  # would end the thread, or look like a client that has left
        raise RuntimeError(f"it raised {type(error).__name__}") from None
