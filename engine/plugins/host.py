"""Runs one plugin in its own thread. Its hooks have time limits. After repeated failures, the
plugin is switched off.
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
        """Run a function or coroutine function in the plugin's thread. Raises its error, or
        `TimeoutError`.
        """
        running = asyncio.run_coroutine_threadsafe(_run(function, arguments), self._loop)
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(running)

    def stop(self) -> None:
        """Stop the thread. Returns soon, even if the plugin does not return."""
        with contextlib.suppress(RuntimeError):  # already stopped
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
    # Errors such as SystemExit and CancelledError would end the thread, or look as if the request
    # had been cancelled.
    except BaseException as error:
        raise RuntimeError(f"it raised {type(error).__name__}") from None


log = logging.getLogger(__name__)

# After this many failures, the plugin is switched off. Failures of all hooks count together: a hook
# that hangs blocks the plugin's thread, so the next hook times out too. A success of a hook resets
# only the count of that hook.
MAX_FAILURES = 3
INITIALIZE_S = 30.0
# Max number of answers that wait until the plugin has observed them. Further answers are dropped.
MAX_OBSERVING = 1024
CLOSE_S = 5.0


class PluginFailedError(UnavailableError):
    """A plugin has failed, or is switched off after failures. The caller ignores this error if the
    plugin's `on_failure` is "pass".
    """

    code = "PLUGIN_FAILED"


class PluginHost:
    """Calls the hooks of one plugin. `is_active` is False while the plugin is switched off."""

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
        self.num_failures = 0  # failures in total
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
        """Whether all requests must be refused, because the plugin is switched off and its
        `on_failure` is "refuse".
        """
        return not self.is_active and self.on_failure == "refuse"

    def refusal(self) -> PluginFailedError:
        state = "failed" if self.is_active else f"is off after {MAX_FAILURES} failures in a row"
        return PluginFailedError(
            f"The plugin '{self.name}' {state}, and nothing is answered without it."
        )

    async def start(self) -> None:
        """Start the plugin. Raises `ConfigError` for invalid options."""
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
        """Stop the plugin. Before that, wait up to `CLOSE_S` for answers that it still has to
        observe.
        """
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
        """Switch the plugin on again and reset its count of failures in a row."""
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
        """Call a hook and return its result. If the plugin refuses, raises the plugin's
        `EngineError`, which has a 4xx status. For all other failures it raises
        `PluginFailedError`; the caller may ignore that. `mistake_in` says why a result is invalid.
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
        """Pass the answer that `make` returns to the plugin. Returns at once; the plugin gets the
        answer in the background.
        """
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
            return  # the failure was counted and logged; no request waits for this call

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
        """Count and log a failure. Above level debug, the log gets only the type and place of the
        error, because the error's text could contain client data.
        """
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
