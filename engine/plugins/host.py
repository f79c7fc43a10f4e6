"""One plugin, held at arm's length: its hooks under a time limit, its failures counted, and the
plugin left out after some in a row.
"""

import asyncio
import contextlib
import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from engine.core.config_tables import PluginTable
from engine.core.errors import ConfigError, EngineError, UnavailableError
from engine.core.interfaces.plugin import InferencePlugin, OnFailure
from engine.plugins.metrics import Hook, Outcome, PluginMetrics

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


log = logging.getLogger(__name__)

MAX_FAILURES = 3  # that no success of the same hook has followed
INITIALIZE_S = 30.0
# Answers that a plugin has yet to look at; further ones it does not see.
MAX_OBSERVING = 1024
CLOSE_S = 5.0


class PluginFailedError(UnavailableError):
    """A plugin that a request can't do without has failed."""

    code = "PLUGIN_FAILED"


class PluginHost:
    """Calls one plugin. `is_active` is whether it takes part in requests now."""

    def __init__(
        self,
        name: str,
        plugin: InferencePlugin,
        table: PluginTable,
        metrics: PluginMetrics,
    ) -> None:
        self.name = name
        self.plugin = plugin
        self.order = table.order
        self.on_failure: OnFailure = table.on_failure or plugin.on_failure
        self.num_failures = 0  # all of them
        self.last_failure: str | None = None
        kind = type(plugin)
        self.prepares = kind.pre_inference is not InferencePlugin.pre_inference
        self.filters = kind.text_filter is not InferencePlugin.text_filter
        looks_at_answers = kind.post_inference is not InferencePlugin.post_inference
        self.rewrites = looks_at_answers and plugin.rewrites_response
        self.observes = looks_at_answers and not plugin.rewrites_response
        self._options: Mapping[str, Any] = table.options
        self._timeout_s = table.timeout_s
        self._metrics = metrics
        self._in_a_row: Counter[Hook] = Counter()
        self._is_off = False
        self._thread: PluginThread | None = None
        self._observing: set[asyncio.Task[None]] = set()

    @property
    def is_active(self) -> bool:
        return not self._is_off

    @property
    def blocks(self) -> bool:
        """Nothing may be answered: the plugin is off, and nothing may pass without it."""
        return not self.is_active and self.on_failure == "refuse"

    def refusal(self) -> PluginFailedError:
        state = "failed" if self.is_active else f"is off after {MAX_FAILURES} failures in a row"
        return PluginFailedError(
            f"The plugin '{self.name}' {state}, and nothing is answered without it."
        )

    async def start(self) -> None:
        """Raises `ConfigError` for options that the plugin can't use."""
        self._thread = PluginThread(self.name)
        self._metrics.set_enabled(self.name, True)
        try:
            await self._call("initialize", INITIALIZE_S, self.plugin.initialize, self._options)
        except ConfigError as error:
            raise ConfigError(f"plugins.{self.name}: {error}", param=error.param) from None
        except Exception as error:
            self._fail("initialize", error)
            if self.on_failure == "refuse":
                raise ConfigError(
                    f"plugins.{self.name}: the plugin could not start ({type(error).__name__},"
                    " see the log); mend it or set enabled = false"
                ) from None
            self._turn_off()

    async def stop(self) -> None:
        """Lets it see the answers that it has not seen yet, for a while."""
        if self._thread is None:
            return
        if self._observing:
            await asyncio.wait(self._observing, timeout=CLOSE_S)
        for task in self._observing:
            task.cancel()
        try:
            await self._call("close", CLOSE_S, self.plugin.close)
        except Exception as error:
            self._fail("close", error)
        await asyncio.to_thread(self._thread.stop)
        self._thread = None

    def enable(self) -> None:
        """Let it take part again, as if it had never failed."""
        self._in_a_row.clear()
        self._is_off = False
        self._metrics.set_enabled(self.name, True)

    async def call(
        self,
        hook: Hook,
        function: Callable[..., Any],
        *arguments: Any,
        mistake_in: Callable[[Any], str | None] = lambda made: None,
    ) -> Any:
        """What a hook returns. Raises an `EngineError` of a 4xx status that the plugin refuses
        with, and `PluginFailedError` for whatever else goes wrong, also if that may be passed over.
        `mistake_in` tells why what it returned can't be used.
        """
        if not self.is_active:
            raise self.refusal()
        try:
            made = await self._call(hook, self._timeout_s, function, *arguments)
        except EngineError as error:
            if not 400 <= error.status < 500:
                self._fail(hook, error)
                raise self.refusal() from None
            self._in_a_row[hook] = 0
            raise
        except Exception as error:
            self._fail(hook, error)
            raise self.refusal() from None
        mistake = mistake_in(made)
        if mistake is not None:
            self._fail(hook, ValueError(mistake), mistake)
            raise self.refusal()
        self._in_a_row[hook] = 0
        return made

    def observe(self, make: Callable[[], Any]) -> None:
        """Show it what `make` gives, while nobody waits."""
        if not self.is_active:
            return
        if len(self._observing) >= MAX_OBSERVING:
            self._metrics.dropped(self.name)
            return
        task = asyncio.get_running_loop().create_task(self._observe(make))
        self._observing.add(task)
        task.add_done_callback(self._observing.discard)

    async def _observe(self, make: Callable[[], Any]) -> None:
        async def look() -> None:
            await self.plugin.post_inference(make())

        try:
            await self.call("post_inference", look)
        except EngineError:
            return  # counted and logged; there is nobody to tell

    async def _call(
        self, hook: Hook, timeout_s: float, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        assert self._thread is not None, "the plugin has not been started"
        began = time.monotonic()
        outcome: Outcome = "error"
        try:
            made = await self._thread.call(function, *arguments, timeout_s=timeout_s)
            outcome = "ok"
            return made
        except TimeoutError:
            outcome = "timeout"
            raise
        except EngineError as error:
            outcome = "refused" if 400 <= error.status < 500 else "error"
            raise
        finally:
            self._metrics.called(self.name, hook, outcome, time.monotonic() - began)

    def _fail(self, hook: Hook, error: BaseException, why: str | None = None) -> None:
        """The log gets the kind of error and its place. Its text could hold a client's words."""
        self.num_failures += 1
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        self.last_failure = f"{hook}: {why or type(error).__name__}"
        log.error("plugin %s failed in %s%s", self.name, self.last_failure, place)
        log.debug("plugin %s", self.name, exc_info=error)
        self._in_a_row[hook] += 1
        if self._in_a_row.total() >= MAX_FAILURES and not self._is_off:
            self._turn_off()

    def _turn_off(self) -> None:
        self._is_off = True
        self._metrics.set_enabled(self.name, False)
        effect = "every request is refused" if self.on_failure == "refuse" else "requests pass it"
        log.error("plugin %s is off now and %s until it is enabled again", self.name, effect)
