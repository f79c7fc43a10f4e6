"""Supervises the engine: tracks the open requests, knows whether the engine is ready, and restarts
an engine that died.

When the engine dies, open requests wait for the next engine and continue there (`survival.py`), or
move to another replica. New requests wait, too. If `max_revivals` is 0, open requests fail at once,
and new ones are refused.

The engine is restarted after a delay, which grows with each death. After too many deaths in a row,
restarts pause for a minute, and the health report says so. `liveness.py` decides when an
engine process that makes no progress is woken or killed. A hung step is first interrupted by the
engine process itself.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from engine.core.errors import EngineError, ModelError, UnavailableError, error_from_code
from engine.core.interfaces.request import (
    Abort,
    CachedPrefixes,
    Control,
    ControlAction,
    ControlReply,
    Deltas,
    Fatal,
    FromEngine,
    GenerateRequest,
    Ready,
    RequestNotes,
    Stats,
)
from engine.core.interfaces.snapshot import EngineSnapshot
from engine.core.interfaces.stats import EngineStats
from engine.core.sandbox.liveness import (
    Downtime,
    LivenessMonitor,
    LivenessVerdict,
    Vitals,
    trouble_of,
)
from engine.frontend.link import Link
from engine.frontend.request_recovery import OpenRequest, OpenRequests, Receiver
from engine.ipc.child_process import RestartPolicy
from engine.ipc.connection import EngineClient, OnExit, OnMessage

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 10.0
# Who watches the server waits for all engines, and needs an answer when one of them is stuck.
SNAPSHOT_TIMEOUT_S = 2.0
WATCH_INTERVAL_S = 0.5
# The delay between restarts after too many deaths in a row.
COOL_DOWN_S = 60.0
RESTARTING = "The engine stopped unexpectedly; it is being restarted."


ClientFactory = Callable[[OnMessage, OnExit], EngineClient]


class EngineLink:
    """Owns the connection to the engine. When the engine dies, `make_client` creates a client for a
    new engine, unless `restarts` is None. `max_revivals` is how often an open request continues in
    a new engine. `move` tries to continue a request elsewhere, and returns whether that worked.
    """

    def __init__(
        self,
        make_client: ClientFactory,
        restarts: RestartPolicy | None,
        cool_down_s: float = COOL_DOWN_S,
        max_revivals: int = 0,
        move: Callable[[OpenRequest], bool] = lambda opened: False,
    ) -> None:
        self._make_client = make_client
        self._restarts = restarts
        self._cool_down_s = cool_down_s
        self._client: EngineClient | None = None
        self.move = move
        self.on_cached: Callable[[CachedPrefixes], None] = lambda message: None
        self._requests = OpenRequests(max_revivals, lambda opened: self.move(opened))
        self._survives = max_revivals > 0
        # The number of engines that were given up. Messages of these engines are dropped.
        self._epoch = 0
        self._replies: dict[int, asyncio.Future[ControlReply]] = {}
        self._num_controls = 0
        self._became_ready = asyncio.Event()
        self._fatal: EngineError | None = None
        self._has_loaded = False  # whether any engine has ever loaded the model
        self._is_given_up = False
        self._watching: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._stopping = False
        self._downtime = Downtime()
        self._given_up_for = ""  # why the process was killed, if this link did that
        self._down_because = ""  # why the last process ended; empty once an engine is ready
        self._in_trouble = False  # the result of the last check; `_watch` checks twice a second
        self._successor: Link | None = None
        self.ready: Ready | None = None
        self.last_ready: Ready | None = None  # stays set while the engine is restarted
        self.stats: EngineStats | None = None
        self.num_restarts = 0

    async def start(self) -> Ready:
        """Start the engine and wait until it has loaded the model. If loading fails, the error of
        the engine is raised. A process that does not go on loading is killed, which ends the wait.
        """
        await self._launch()
        await self._became_ready.wait()
        if self.ready is None:
            raise self._fatal or ModelError("The engine ended while loading; its log says why.")
        return self.ready

    async def stop(self) -> None:
        """Fail every open request and stop the engine. Safe to call twice, and while the engine is
        starting.
        """
        self._stopping = True
        for task in (self._restarting, self._watching):
            if task is not None:
                task.cancel()
        self._on_down(UnavailableError("The server is shutting down."))
        if self._client is not None:
            await self._client.stop()

    def submit(self, request: GenerateRequest, receiver: Receiver) -> None:
        if self._successor is not None:
            receiver.engine = self._successor
            self._successor.submit(request, receiver)
            return
        if self.ready is None and not self._awaits_restart:
            raise UnavailableError(self.detail, retry_after=2.0)
        self._requests.submit(request, receiver, self._send)

    def take_over(self, opened: OpenRequest) -> None:
        """Continue a request of another engine in this one."""
        opened.receiver.engine = self
        self._requests.take_over(opened, self._send)

    def hold(self, request: GenerateRequest, receiver: Receiver) -> None:
        """Let a request wait here until it is released, or until its time to wait is over."""
        receiver.engine = self
        self._requests.submit(request, receiver, None)

    def release(self) -> list[OpenRequest]:
        """Give up all open requests, so that other engines can take them over."""
        return self._requests.release_all()

    def hand_over(self, successor: Link) -> int:
        """Move all open requests to the engine of `successor`, and submit later requests there.
        Deltas of this engine are dropped from now on. Returns the number of moved requests.
        """
        self._successor = successor
        released = self.release()
        for opened in released:
            successor.take_over(opened)
        return len(released)

    @property
    def _send(self) -> Callable[[GenerateRequest], None] | None:
        """Sends to the engine. None while no engine is ready."""
        return None if self.ready is None or self._client is None else self._client.send

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def survives(self) -> bool:
        """Whether open requests can continue in another engine."""
        return self._survives

    def forget(self, request_id: str, choice: int | None) -> None:
        """Tell the engine to abort one choice of a request, or the whole request if `choice` is
        None. Never raises.
        """
        self._requests.drop(request_id, choice)
        if self.ready is not None and self._client is not None:
            try:
                self._client.send(Abort(request_id, choice))
            except EngineError as error:
                log.debug("nothing to abort: %s", error)

    def leave(self, request_id: str, notes: RequestNotes) -> None:
        """The client of an aborted request left. What happened to it is still added to `notes`."""
        self._requests.leave(request_id, notes)

    def done(self, request_id: str) -> None:
        """Drop the receiver of a request that has ended. Sends nothing to the engine."""
        self._requests.drop(request_id)

    def num_left(self, request_id: str, choice: int) -> int | None:
        """How many tokens a choice of an open request may still get. None if it is not known."""
        return self._requests.num_left(request_id, choice)

    def num_revivals(self, request_id: str) -> int:
        """How often an open request continued in a new engine."""
        return self._requests.num_revivals(request_id)

    @property
    def num_revived(self) -> int:
        """How often a request continued in a new engine, summed over all requests."""
        return self._requests.num_revived

    async def flush_cache(self) -> ControlReply:
        """Make the engine drop every cached prefix that no running request uses."""
        return await self.control("flush_cache")

    async def set_log_level(self, level: str) -> ControlReply:
        """Set the log level of the engine process. The reply contains the previous level."""
        return await self.control("log_level", level)

    async def snapshot(self) -> EngineSnapshot | None:
        """What the engine is doing now. None if it is an encoder."""
        return (await self.control("snapshot", timeout_s=SNAPSHOT_TIMEOUT_S)).snapshot

    async def load_adapter(self, path: str, timeout_s: float) -> ControlReply:
        """Make the engine load a LoRA adapter. The reply has its facts as JSON, or says why the
        adapter can't be used.
        """
        return await self.control("load_adapter", path, timeout_s)

    async def snapshots(self) -> dict[str, EngineSnapshot]:
        taken = await self.snapshot()
        return {} if taken is None else {"": taken}

    def answered_by(self, request_id: str) -> tuple[str, ...]:
        return ()  # there is only one engine

    async def control(
        self, action: ControlAction, value: str = "", timeout_s: float | None = None
    ) -> ControlReply:
        """Ask the engine to do something, and wait until it has."""
        if self.ready is None or self._client is None:
            raise UnavailableError(self.detail, retry_after=2.0)
        self._num_controls += 1
        control_id = self._num_controls
        reply: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._client.send(Control(control_id, action, value))
        self._replies[control_id] = reply
        try:
            return await asyncio.wait_for(reply, timeout_s or CONTROL_TIMEOUT_S)
        except TimeoutError:
            raise UnavailableError("The engine did not answer in time; try again.") from None
        finally:
            self._replies.pop(control_id, None)

    @property
    def detail(self) -> str:
        """The state in words, for health reports and error messages."""
        if self.ready is not None:
            return "ready"
        if self._stopping:
            return "The engine has been stopped."
        if self._is_given_up:
            return f"The engine died too often; it is tried again every {self._cool_down_s:g} s."
        if self._fatal is not None:
            return "The engine is down; its log says why."
        state = RESTARTING if self._has_loaded else "The engine is loading."
        state += f" Cause: {self._down_because}" if self._down_because else ""
        trouble = self._trouble_of(self._vitals())
        return state if trouble is None else f"{state} {trouble}"

    @property
    def pid(self) -> int | None:
        return self._client.pid if self._client is not None else None

    @property
    def step_age_s(self) -> float | None:
        """Seconds since the last sign of progress of the engine loop. None if the loop is idle."""
        vitals = self._vitals()
        return None if vitals is None else vitals.step_age_s

    @property
    def trouble(self) -> str | None:
        """Why a loaded engine makes no progress, in words. None if it makes progress."""
        return None if self.ready is None else self._trouble_of(self._vitals())

    def _trouble_of(self, vitals: Vitals | None) -> str | None:
        return None if vitals is None else trouble_of(vitals)

    @property
    def is_overdue(self) -> bool:
        """Whether an engine that had loaded is down for longer than restarts may take."""
        return self._downtime.is_overdue and not self._stopping and self._successor is None

    @property
    def is_up(self) -> bool:
        """Whether the engine is loaded and made progress at the last check, so that requests can be
        submitted.
        """
        return self.ready is not None and not self._in_trouble

    @property
    def accepts(self) -> bool:
        """Whether `submit` takes a request. It may wait until the engine is restarted."""
        return self.is_up or self._awaits_restart

    @property
    def _awaits_restart(self) -> bool:
        is_ending = self._stopping or self._is_given_up
        can_restart = self._survives and self._has_loaded and self._restarts is not None
        return can_restart and not is_ending

    def _vitals(self) -> Vitals | None:
        return self._client.vitals() if self._client is not None else None

    async def _launch(self) -> None:
        epoch = self._epoch

        def on_message(message: FromEngine) -> None:
            if epoch == self._epoch:
                self._on_message(message)

        client = self._client = self._make_client(on_message, self._on_exit)
        await client.start()
        self._given_up_for = ""
        self._downtime.load(client.pid)
        self._watching = asyncio.get_running_loop().create_task(self._watch(client))

    async def _watch(self, client: EngineClient) -> None:
        """Watch the heartbeat, from the moment the process starts. A process that stops ticking is
        woken. One that does not go on is killed and given up: its requests do not wait until it has
        ended, and what it still sends is dropped. `_on_exit` starts the next one.
        """
        monitor = LivenessMonitor()
        verdict = LivenessVerdict.WAIT
        while verdict is not LivenessVerdict.GIVE_UP:
            await asyncio.sleep(WATCH_INTERVAL_S)
            vitals = client.vitals()
            self._in_trouble = self._trouble_of(vitals) is not None
            if vitals is None:
                continue
            verdict = monitor.check(vitals, time.monotonic())
            if verdict is LivenessVerdict.WAKE:
                log.critical("the engine's process is silent; waking it (%s)", vitals)
                client.wake()
            elif vitals.silent_s is not None and (why := self._downtime.too_long()) is not None:
                self._given_up_for, verdict = why, LivenessVerdict.GIVE_UP
        why = self._given_up_for or self._trouble_of(vitals)
        self._given_up_for = why or "Its step does not end."
        log.critical("the engine does not go on; killing it (%s)", vitals)
        if await client.kill():
            if not self._has_loaded:
                self._fatal = ModelError(f"The engine did not load: {self._given_up_for}")
            self._on_down(UnavailableError(RESTARTING))

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            self._requests.deliver(message.deltas)
        elif isinstance(message, Stats):
            self.stats = message.stats
        elif isinstance(message, CachedPrefixes):
            self.on_cached(message)
        elif isinstance(message, Ready):
            self.ready, self._fatal, self._has_loaded = message, None, True
            self.last_ready = message
            self._is_given_up, self._down_because = False, ""
            self._downtime.loaded()
            self._became_ready.set()
            if self._client is not None:
                self._requests.revive(self._client.send)
        elif isinstance(message, ControlReply):
            reply = self._replies.pop(message.control_id, None)
            if reply is not None and not reply.done():
                reply.set_result(message)
        elif isinstance(message, Fatal):
            self._fatal = error_from_code(message.code, message.message)
            if self._has_loaded:  # otherwise `start` raises the error
                log.error("the engine can't go on: %s", message.message)
            self._on_down(UnavailableError(self.detail) if self._has_loaded else self._fatal)

    def _on_exit(self, status: int) -> None:
        """Called when the engine process ended without being asked to."""
        cause = f"signal {-status}." if status < 0 else f"exit status {status}."
        self._down_because = self._given_up_for or cause
        log.error("the engine process ended: %s", self._down_because)
        self.lost(RESTARTING)
        if self._has_loaded and not self._stopping and self._successor is None:
            self._restart_later()  # an engine that has never loaded would only fail again

    def lost(self, detail: str) -> None:
        """The engine is gone. Its open requests move, wait for the next engine, or end."""
        self._client = None
        if self._watching is not None:
            self._watching.cancel()
        self._on_down(UnavailableError(detail))

    def _restart_later(self) -> None:
        if self._restarts is None:
            return
        delay = self._restarts.delay_after_death()
        self._is_given_up = delay is None
        if delay is None:
            log.critical("the engine died too often; it stays down for %g s", self._cool_down_s)
            delay = self._cool_down_s
        self._restarting = asyncio.get_running_loop().create_task(self._restart(delay))

    async def _restart(self, delay: float) -> None:
        log.warning("starting the engine again in %.1f s", delay)
        await asyncio.sleep(delay)
        self.num_restarts += 1
        try:
            await self._launch()
        except Exception:  # such as too many processes, or no memory; the next attempt may succeed
            log.exception("the engine's process could not be started")
            self._client = None
            self._restart_later()

    def _on_down(self, error: EngineError) -> None:
        self._epoch += 1
        if self.ready is not None:
            self._downtime.down()
        self.ready = None
        self._in_trouble = False
        self.stats = None
        if self._survives and not self._stopping:
            self._requests.interrupt(error)
        else:
            self._requests.fail(error)
        self._became_ready.set()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)
        self._replies.clear()
