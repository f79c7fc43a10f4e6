"""Recovers from a step that raised. Bisection finds the faulty row, so that only the request of
this row fails.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from engine.core.errors import InferenceError
from engine.core.interfaces.request import TokenDelta
from engine.runtime.model_runner import StepOutput
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import Row, ScheduledBatch

log = logging.getLogger(__name__)


class Bisection:
    """Runs the rows of a failed step again. Before that, the caller must roll the scheduler back to
    the last finished step.

    `run_step` runs a batch and returns its output. `send` sends deltas to the frontend. Deltas of
    requests that failed are not sent, but collected in `failures`. If the runner's layers keep
    states, a failed step may have changed those of its rows. Then each sequence is first computed
    again from its beginning, `replayed` tokens at a time. 0 means that no layer keeps a state.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        run_step: Callable[[ScheduledBatch], StepOutput],
        send: Callable[[list[TokenDelta]], None],
        replayed: int = 0,
    ) -> None:
        self.failures: list[TokenDelta] = []
        self._scheduler = scheduler
        self._run_step = run_step
        self._send = send
        self._replayed = replayed

    def run(self, rows: Sequence[Row]) -> None:
        """Run the rows together. If that raises, run each half separately. If a single row raises,
        its request fails.
        """
        scheduler = self._scheduler
        if self._replayed:
            rows = [row for row in rows if self._replay(row)]
        granted = [again for row in rows if (again := scheduler.retry_row(row)) is not None]
        if not granted:
            return
        batch = ScheduledBatch(tuple(granted))
        try:
            output = self._run_step(batch)
        except Exception as error:
            scheduler.rollback()
            if len(granted) == 1:
                self._fail(granted[0], error)
                return
            middle = len(granted) // 2
            self.run(granted[:middle])
            self.run(granted[middle:])
            return
        self._emit(scheduler.update(batch, output, time.monotonic()))

    def _replay(self, row: Row) -> bool:
        """Compute the sequence's tokens before the row again. Returns False if that raises. Then
        the request has failed.
        """
        for part in self._earlier_rows(row):
            batch = ScheduledBatch((part,))
            try:
                self._emit(self._scheduler.update(batch, self._run_step(batch), time.monotonic()))
            except Exception as error:
                self._scheduler.rollback()
                self._fail(part, error)
                return False
        return True

    def _earlier_rows(self, row: Row) -> Iterator[Row]:
        """Rows with the tokens before `row`, from the sequence's beginning or from the checkpoint
        with which it started. Each must be run before the next one is taken. There are none if the
        row cannot be retried.
        """
        seq, start = row.seq, row.start
        if seq.life != row.life or seq.num_computed != start:
            return
        self._scheduler.kv.rewind(seq)
        while seq.num_computed < start and seq.life == row.life:
            begin = seq.num_computed
            seq.num_computed = min(start, begin + self._replayed)
            yield Row(seq, begin, seq.num_computed - begin, False, seq.slot, seq.life)

    def _emit(self, deltas: list[TokenDelta]) -> None:
        self.failures += [delta for delta in deltas if delta.finish_reason == "error"]
        self._send([delta for delta in deltas if delta.finish_reason != "error"])

    def _fail(self, row: Row, error: Exception) -> None:
        log.error("request %s failed alone", row.seq.request_id, exc_info=error)
        failure = InferenceError("The model failed on this request.")
        self._emit([self._scheduler.fail(row.seq, failure, time.monotonic())])


def is_out_of_memory(error: Exception) -> bool:
    # The type of the exception is compared by name. Each device library has its own type, and this
    # module imports none of these libraries.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
