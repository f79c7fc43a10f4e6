"""The engine loop. An iteration reads messages, schedules a step, runs it, and sends its tokens.

With an asynchronous runner (depth 1), the forward pass of a step is launched before the tokens of
the previous step are awaited. With depth 0, each step finishes in its own iteration. If a step
raises, its rows are bisected (`recovery.py`) to find the row that raises even alone. Only the
request of that row fails. An error outside a step fails only the request that it concerns.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from engine.core.errors import InferenceError
from engine.core.interfaces.request import (
    Abort,
    Control,
    ControlReply,
    Deltas,
    GenerateRequest,
    Stats,
    Stop,
    TokenDelta,
)
from engine.core.interfaces.stats import EngineStats
from engine.core.sandbox.liveness import UNKNOWN_STEP_TIMEOUT_S, NoPulse, Pulse
from engine.ipc.transport import Channel, ConnectionClosedError
from engine.runtime.batch import BatchBuilder
from engine.runtime.budget import StepBudget, StepCounter
from engine.runtime.dummy_batch import warm_up
from engine.runtime.insight.controls import answer_control
from engine.runtime.insight.request_timing import EngineClock, RequestTimings
from engine.runtime.insight.snapshot import SnapshotTaker
from engine.runtime.model_runner import (
    BatchInputs,
    ModelRunner,
    PendingTokens,
    RemoteRunner,
    RunnerLostError,
    SamplingInputs,
    StepOutput,
)
from engine.runtime.outputs import Progress, engine_stats
from engine.runtime.prefill_throttle import PrefillThrottle, StepPlan, demand_of
from engine.runtime.recovery import Bisection, is_out_of_memory
from engine.runtime.requests.admission import RequestAdmission
from engine.runtime.requests.grammar import Grammars, MaskJob, MaskWriter, constrained_rows
from engine.runtime.requests.images import ImageStore
from engine.runtime.samplers.chain import ChainSampler
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import CacheExtension, ScheduledBatch, SequenceFaultError
from engine.runtime.speculation.drafts import Speculation

if TYPE_CHECKING:
    from engine.runtime.groups.adapter_slots import AdapterSlots

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_POLL_S = 1.0
REMOTE_POLL_S = 0.25  # how often an idle engine checks a runner in other processes
COMPILE_POLL_S = 0.002
STATS_INTERVAL_S = 0.5
NO_ADAPTERS = (
    "This engine serves no LoRA adapters: they need native, torch or jax, one rank, and"
    " performance.max_adapters above 0."
)
MAX_SCHEDULE_FAILURES = 2  # the engine ends after more consecutive failures than this


class Forwarded(msgspec.Struct, frozen=True):
    """A step after its `forward` call and before its `sample` call."""

    handle: Any
    masks: MaskJob | None


class StepRunner:
    """Runs planned steps on the model runner: builds their arrays, computes the masks of grammars
    beside the forward pass, and samples.
    """

    def __init__(
        self, runner: ModelRunner, clock: EngineClock, groups: Sequence[CacheExtension]
    ) -> None:
        self._runner, self._clock = runner, clock
        self._builder = BatchBuilder(runner.spec, groups)
        self._chain = ChainSampler(runner)
        # The mask writer is created for the first step that has a row with a grammar.
        self._masks: MaskWriter | None = None
        self.is_computing = False  # whether `compute` runs

    def compute(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a call that may take long. The watchdog can interrupt a step only inside this
        function.
        """
        self.is_computing = True
        try:
            return call(*arguments)
        finally:
            self.is_computing = False

    def forward(self, batch: ScheduledBatch) -> Forwarded:
        masks = self._begin_masks(batch)
        inputs = self._builder.inputs(batch)
        return Forwarded(self.compute(self._run_forward, inputs), masks)

    def _run_forward(self, inputs: BatchInputs) -> Any:
        """Runs the forward pass. Fault injection wraps this method."""
        return self._runner.forward(inputs)

    def sample(self, forwarded: Forwarded, batch: ScheduledBatch) -> PendingTokens:
        mask = None
        if forwarded.masks is not None:
            late = constrained_rows(batch, only_known=False, done=forwarded.masks.done)
            began_at = time.monotonic()
            mask = self.compute(forwarded.masks.finish, late)
            self._clock.masked(time.monotonic() - began_at)
        sampling = self._builder.sampling(batch, mask)
        if len(sampling.host_rows):
            sampling = self.compute(self._chain.sample, forwarded.handle, sampling, batch)
        return self.compute(self._run_sample, forwarded.handle, sampling)

    def _run_sample(self, handle: Any, sampling: SamplingInputs) -> PendingTokens:
        """Starts to sample. Fault injection wraps this method."""
        return self._runner.sample(handle, sampling)

    def wait(self, pending: PendingTokens) -> StepOutput:
        return self.compute(pending.wait)

    def forget(self) -> None:
        """Steps have failed, or were forgotten."""
        self._builder.forget()

    def close(self) -> None:
        if self._masks is not None:
            self._masks.close()

    def _begin_masks(self, batch: ScheduledBatch) -> MaskJob | None:
        rules = [row.seq.rules for row in batch.rows if row.seq.rules is not None]
        if all(each.constraint is None for each in rules):
            return None
        if self._masks is None:
            self._masks = MaskWriter(self._runner.spec.vocab_size)
        num_rows = sum(row.samples + len(row.draft) for row in batch.rows)
        return self._masks.begin(num_rows, constrained_rows(batch, only_known=True))


class Launch(msgspec.Struct, frozen=True):
    """A step that was launched on the device. The host has not waited for its tokens yet."""

    batch: ScheduledBatch
    pending: PendingTokens
    started_at: float
    num_drafting: int  # number of tokens in rows with drafts


class EngineLoop:
    """Owns a scheduler and a runner. All work is done in the thread that calls `run`, except
    compiling grammars and computing masks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        channel: Channel,
        budget: StepBudget,
        max_queued: int,
        pulse: Pulse | None = None,
        grammars: Grammars | None = None,
        images: ImageStore | None = None,
        adapters: "Callable[[], AdapterSlots] | None" = None,
    ) -> None:
        self.scheduler = scheduler
        spec = runner.spec
        self._throttle = PrefillThrottle(budget, spec.step_sizes) if spec.paces else None
        self._runner = runner
        self._channel = channel
        self._budget = budget
        self._pulse = pulse or NoPulse()
        self._remote = runner if isinstance(runner, RemoteRunner) else None
        self._timings, self._progress = RequestTimings(scheduler), Progress()
        self._clock = self._timings.clock
        scheduler.attach(self._timings)
        scheduler.attach(self._progress)
        self._drafts = scheduler.find(Speculation)
        self._step_runner = StepRunner(runner, self._clock, scheduler.kv.groups)
        self._grammars = grammars
        made = (grammars, images, adapters, runner)
        self._admission = RequestAdmission(runner.spec, scheduler, max_queued, *made)
        self._launched: Launch | None = None
        self._stopping = False
        self._num_steps = 0
        self._steps = StepCounter()
        self._finished_at = 0.0  # when the last step finished
        self._checked_step = 0
        self._num_invariant_failures = 0
        self._stats_sent_at = 0.0
        self._reported = (0, 0, 0)  # the value of `_state` at the last stats message
        self._num_schedule_failures = 0  # consecutive
        self._step_timeout_s = UNKNOWN_STEP_TIMEOUT_S
        self._snapshots: SnapshotTaker | None = None  # made when somebody watches
        self._pulse.watch(self)
        if runner.spec.has_state and scheduler.kv.publishes_at_once:
            # Cached keys and values are of no use without the states that belong to them.
            scheduler.kv.sharing = False

    @property
    def is_computing(self) -> bool:
        """Whether the loop is inside a call that the watchdog may interrupt."""
        return self._step_runner.is_computing

    def run(self) -> None:
        """Serve until a `Stop` message arrives, then abort all requests and close the runner."""
        while not self._stopping:
            self.turn(IDLE_POLL_S)
        self._end_all()

    def turn(self, idle_timeout_s: float) -> None:
        """Run one iteration. If there is no work, it waits up to `idle_timeout_s` for messages."""
        if self._remote is not None:
            self._remote.check()
            idle_timeout_s = min(idle_timeout_s, REMOTE_POLL_S)
        is_idle = self._launched is None and not self.scheduler.has_work
        num_steps = self._num_steps
        is_pending = self._admission.num_pending > 0
        has_images = is_pending and self._admission.pending.has_images
        self._pulse.beat(not is_idle, self._step_timeout_s)
        adapters = self._admission.pending.adapters
        is_loading = adapters is not None and adapters.is_loading
        if is_pending or is_loading:
            idle_timeout_s = min(idle_timeout_s, COMPILE_POLL_S)
        self._admission.observe(time.monotonic())
        self._read_inbox(idle_timeout_s if is_idle and not has_images else 0.0)
        now = time.monotonic()
        if has_images:
            # One image in each iteration: other requests wait at most as long as this takes.
            self._pulse.beat(True, UNKNOWN_STEP_TIMEOUT_S)
            self._send(self._step_runner.compute(self._admission.encode_image, now))
        if is_pending:
            self._send(self._admission.admit_ready(now))
        if is_loading and adapters is not None:
            adapters.reply(self._channel.send)
        self._send(self._admission.expire(now))
        self._step()
        for each in self.scheduler.advancing:
            if each.has_work:
                self._pulse.beat(True, UNKNOWN_STEP_TIMEOUT_S)  # it may take longer than a step
                self._send(self._step_runner.compute(each.advance, self._runner))
        self._send_stats(force=not self.scheduler.has_work and self._has_news)
        for extension in self.scheduler.kv.extensions:
            if (news := extension.news()) is not None:
                self._channel.send(news)
        # A request that ended in this very iteration may be followed by another one at once.
        if is_idle and not self.scheduler.has_work and self._num_steps == num_steps:
            self._tidy_up()

    def _step(self) -> None:
        scheduler = self.scheduler
        plan = self._plan()
        drafts = self._drafts
        if drafts is not None and drafts.awaits_tokens and not self._finish_early():
            return
        started_at = time.monotonic()
        try:
            batch = scheduler.schedule(plan.num_tokens, started_at, pauses=plan.pauses)
        except Exception as error:
            self._recover_schedule(error)
            return
        self._num_schedule_failures = 0
        self._send(self._progress.take_begun())
        try:
            forwarded = self._forward(batch) if batch else None
            self._finish_launched()
            if batch and forwarded:
                began_at = started_at if drafts is None else started_at + drafts.draft_s
                num_drafting = 0 if drafts is None else drafts.num_drafting
                pending = self._step_runner.sample(forwarded, batch)
                self._launched = Launch(batch, pending, began_at, num_drafting)
                if self._runner.spec.depth == 0:
                    self._finish_launched()
        except (ConnectionClosedError, RunnerLostError):
            raise
        except Exception as error:
            self._recover(batch, error)

    def _plan(self) -> StepPlan:
        """The size of the next step."""
        table = self.scheduler.table
        # What an engine that died had computed is computed again at full speed, and not in small
        # parts beside decode. Otherwise the last stream would pause for much longer.
        if table.is_catching_up:
            return StepPlan(self._budget.tokens(0, table.num_running))
        if self._throttle is not None:
            return self._throttle.plan(demand_of(self.scheduler))
        return StepPlan(self._budget.tokens(table.num_decoding, table.num_running))

    def _forward(self, batch: ScheduledBatch) -> Forwarded:
        # The heartbeat says after which time the step counts as hung.
        self._step_timeout_s = self._budget.step_timeout_s(len(batch.rows), batch.num_tokens)
        self._pulse.beat(True, self._step_timeout_s)
        return self._step_runner.forward(batch)

    def _finish_launched(self) -> None:
        """Wait for the launched step, if there is one, and apply its output. If waiting raises, the
        step remains registered as launched.
        """
        launch = self._launched
        if launch is None:
            return
        output = self._step_runner.wait(launch.pending)
        self._launched = None
        now = time.monotonic()
        self._num_steps += 1
        # If this step was queued on the device behind another step, it started when that step
        # ended.
        began_at = max(launch.started_at, self._finished_at)
        seconds = now - began_at
        lengths = [row.length for row in launch.batch.rows]
        num_tokens, num_single = sum(lengths), lengths.count(1) + launch.num_drafting
        self._steps.add(num_tokens, seconds)
        self._clock.step(began_at, now, lengths, launch.num_drafting)
        self._finished_at = now
        self._budget.record(num_single, num_tokens - num_single, seconds)
        self._send(self.scheduler.update(launch.batch, output, now))

    def _finish_early(self) -> bool:
        """Finish the launched step before the next one is planned. Returns False if it failed."""
        try:
            self._finish_launched()
        except (ConnectionClosedError, RunnerLostError):
            raise
        except Exception as error:
            self._recover(None, error)
            return False
        return True

    def _recover(self, batch: ScheduledBatch | None, error: Exception) -> None:
        """Bisect the rows of the steps in flight: run them again in smaller groups. If a row raises
        even alone, its request fails. At the end, a warm-up step without any request runs. If it
        raises as well, no request is at fault, and the engine ends. So failures are sent only after
        the warm-up.
        """
        log.error("a step failed; bisecting it", exc_info=error)
        if is_out_of_memory(error):
            self._budget.shrink()
        launch, self._launched = self._launched, None
        batches = ([launch.batch] if launch else []) + ([batch] if batch else [])
        self._rollback()
        replayed = self._budget.tokens(0, 0) if self._runner.spec.has_state else 0
        bisection = Bisection(self.scheduler, self._run_whole, self._send, replayed)
        for failed in batches:
            bisection.run(failed.rows)
        warm_up(self._runner)
        self._send(bisection.failures)

    def _recover_schedule(self, error: Exception) -> None:
        """Recover from an error in `Scheduler.schedule`. If one sequence caused the error, only
        that sequence fails. Otherwise the next iteration tries again, a limited number of times.
        """
        if not isinstance(error, SequenceFaultError):
            self._num_schedule_failures += 1
            if self._num_schedule_failures > MAX_SCHEDULE_FAILURES:
                raise error
        log.error("a step could not be planned; planning it again", exc_info=error)
        self._finish_early()
        self._rollback()
        if isinstance(error, SequenceFaultError) and error.seq.finish_reason is None:
            failure = InferenceError("The engine failed on this request.")
            self._send([self.scheduler.fail(error.seq, failure, time.monotonic())])
        self.scheduler.check()  # if the scheduler's state is broken, the engine ends here

    def _rollback(self) -> None:
        self.scheduler.rollback()
        self._step_runner.forget()

    def _run_whole(self, batch: ScheduledBatch) -> StepOutput:
        """Run one step to the end: forward, sample, wait. No other step runs meanwhile."""
        self._step_runner.forget()  # the step before may have failed
        began_at = time.monotonic()
        pending = self._step_runner.sample(self._forward(batch), batch)
        output = self._step_runner.wait(pending)
        self._num_steps += 1
        lengths = [row.length for row in batch.rows]
        self._clock.step(began_at, time.monotonic(), lengths)
        return output

    def _read_inbox(self, timeout_s: float) -> None:
        now = time.monotonic
        for message in self._channel.poll(timeout_s):
            if isinstance(message, GenerateRequest):
                self._send(self._submit(message, now()))
            elif isinstance(message, Abort):
                self._send(self._admission.abort(message.request_id, message.choice, now()))
            elif isinstance(message, Control):
                if (reply := self._control(message)) is not None:
                    self._channel.send(reply)
            elif isinstance(message, Stop):
                self._stopping = True

    def _submit(self, request: GenerateRequest, now: float) -> list[TokenDelta]:
        try:
            return self._admission.submit(request, now)
        except Exception:
            log.exception("request %s could not be submitted", request.request_id)
            return self._admission.fail(request, range(request.params.n), now)

    def _control(self, message: Control) -> ControlReply | None:
        if message.action == "snapshot":
            self._send_stats(force=True)  # the counters that belong to the snapshot
            if self._snapshots is None:
                self._snapshots = SnapshotTaker(self.scheduler, self._timings, self._runner)
            try:
                snapshot = self._snapshots.take(time.monotonic())
            except Exception:  # no request depends on the live view
                log.exception("no snapshot could be taken")
                return ControlReply(message.control_id, False, "No snapshot could be taken.")
            return ControlReply(message.control_id, True, snapshot=snapshot)
        if message.action == "load_adapter":
            if (adapters := self._admission.pending.with_adapters()) is None:
                return ControlReply(message.control_id, False, NO_ADAPTERS)
            adapters.control(message)
            return None  # the reply is sent when the adapter is loaded
        return answer_control(self.scheduler.kv, message)

    def _send(self, deltas: list[TokenDelta]) -> None:
        if deltas:
            self._channel.send(Deltas(tuple(deltas)))

    def _end_all(self) -> None:
        now = time.monotonic()
        live = list(self.scheduler.table.sequences())
        ended = [self.scheduler.finish(seq, "abort", now) for seq in live]
        self._send(ended + self._admission.abort_pending(now))
        for each in self.scheduler.kv.extensions:
            each.close()
        self._runner.close()
        if self._grammars is not None:
            self._grammars.close()
        self._step_runner.close()

    def _tidy_up(self) -> None:
        """Does the work that is left for idle times: expires old prefixes, and checks the
        scheduler's invariants once after each busy period. If an invariant is broken, the failure
        is counted and the KV cache is rebuilt.
        """
        self.scheduler.kv.radix.expire()
        if self._checked_step == self._num_steps:
            return
        self._checked_step = self._num_steps
        try:
            self.scheduler.check()
        except AssertionError:
            self._num_invariant_failures += 1
            log.exception("an invariant of the KV cache is broken; rebuilding it")
            self.scheduler.rebuild()

    @property
    def _has_news(self) -> bool:
        """Whether the step count or the number of running or waiting sequences changed since the
        last stats message.
        """
        return self._reported != self._state

    @property
    def _state(self) -> tuple[int, int, int]:
        table = self.scheduler.table
        return self._num_steps, table.num_running, table.num_waiting

    def _send_stats(self, force: bool) -> None:
        now = time.monotonic()
        if force or now - self._stats_sent_at >= STATS_INTERVAL_S:
            self._stats_sent_at = now
            if self._snapshots is not None:
                self._snapshots.expire(now)
            self._reported = self._state
            self._channel.send(Stats(self.stats()))

    def describe(self) -> str:
        """The loop's state for the log. The watchdog thread calls this while the loop is stuck."""
        return str(self.stats())

    def stats(self) -> EngineStats:
        return engine_stats(
            self.scheduler, self._num_steps, self._num_invariant_failures, self._steps.counts()
        )
