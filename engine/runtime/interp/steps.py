"""Connects probes with the steps of the engine: taps into a step, captured rows out of it."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from weakref import WeakKeyDictionary

from engine.core.errors import EngineError, InvalidRequestError, RateLimitError
from engine.core.interfaces.interp import InterpRequest
from engine.core.interfaces.request import AdapterRef, GenerateRequest, TokenDelta
from engine.core.memory import memory_room
from engine.runtime.interp.probe import Probe
from engine.runtime.interp.reports import Reports
from engine.runtime.interp.taps import TapInputs, Tappable, Taps
from engine.runtime.model_runner import BatchInputs, ModelRunner, StepOutput
from engine.runtime.sequence import Extension, Row, ScheduledBatch, Sequence

log = logging.getLogger(__name__)

# What the sequences of a tenant may take together, and those of all tenants. Sequences whose
# results are being made count too.
MAX_HELD_BYTES = 512 * 2**20
MAX_ALL_HELD_BYTES = 4 * MAX_HELD_BYTES


class Probes(Extension):
    """The probes of sequences that have not ended, and the results of those that have."""

    drafts = "none"

    def __init__(self) -> None:
        self._of: dict[Sequence, Probe] = {}
        # Those of sequences that ended while a step with their rows was in flight
        self._ended: WeakKeyDictionary[Sequence, Probe] = WeakKeyDictionary()
        self.reports = Reports()

    def put(self, seq: Sequence, probe: Probe, deadline: float | None) -> None:
        probe.deadline = deadline
        self._of[seq] = probe

    def live(self) -> Iterable[tuple[str, Probe]]:
        """All probes with their tenants, also those whose results are being made."""
        yield from ((seq.tenant, probe) for seq, probe in self._of.items())
        yield from self.reports.probes()

    def row_length(self, seq: Sequence, start: int, count: int, room: int) -> int:
        return min(count, self._of[seq].max_row)

    def needs_logits(self, seq: Sequence, start: int, end: int) -> bool:
        return self._of[seq].needs_logits(start, end)

    def starts_over(self, seq: Sequence) -> bool:
        return self._of[seq].lacks(len(seq.tokens) - 1)

    def nonfinite(self, seq: Sequence) -> EngineError | None:
        if not self._of[seq].request.edits:
            return None
        return InvalidRequestError(
            "interp.edit: with these edits, the model produced non-finite values; use smaller"
            " vectors and scales.",
            param="interp.edit",
        )

    def captured(self, batch: ScheduledBatch, output: StepOutput) -> list[Sequence]:
        """Give each sequence what its row captured. Returns the sequences that could not take
        it.
        """
        start = 0
        failed: list[Sequence] = []
        assert output.captured is not None
        for index, row in enumerate(batch.rows):
            seq, probe = row.seq, self._of.get(row.seq) or self._ended.get(row.seq)
            if probe is None:
                continue
            count = probe.num_captures(row.start, row.length)
            rows, start = output.captured[start : start + count], start + count
            if seq.finish_reason is not None or not output.finite[index]:
                continue
            try:
                probe.take(row, rows)
            except Exception:  # such as a lack of memory
                log.exception("request %s could not take what it captured", seq.request_id)
                failed.append(seq)
        return failed

    def add_inputs(self, inputs: BatchInputs, rows: tuple[Row, ...]) -> BatchInputs:
        """Add the taps of a step's rows."""
        found: list[Taps] = []
        widths: tuple[int, ...] = ()
        for row, first in zip(rows, inputs.query_start.tolist(), strict=False):
            probe = self._of.get(row.seq)
            taps = None if probe is None else probe.taps(row.start, row.length, first)
            if probe is not None and taps is not None:
                found.append(taps)
                widths = probe.widths
        return replace(inputs, taps=TapInputs.of(tuple(found), widths) if found else None)

    def advance_inputs(self, inputs: BatchInputs, rows: tuple[Row, ...]) -> BatchInputs:
        return self.add_inputs(inputs, rows)

    def holds_back(self, seq: Sequence, delta: TokenDelta) -> bool:
        """Keep the last delta of a sequence until its results are made."""
        probe = self._of[seq]
        if delta.finish_reason not in ("stop", "length") or not probe.reads:
            return False
        self.reports.hold(seq, probe, delta)
        return True

    def ended(self, seq: Sequence) -> None:
        if (probe := self._of.pop(seq, None)) is not None:
            self._ended[seq] = probe

    def aborted(self, request_id: str) -> None:
        self.reports.drop(request_id)

    @property
    def has_work(self) -> bool:
        return len(self.reports) > 0

    def advance(self, runner: ModelRunner) -> list[TokenDelta]:
        assert isinstance(runner, Tappable)
        return self.reports.advance(runner)


def make_probe(
    request: GenerateRequest,
    interp: InterpRequest,
    runner: ModelRunner,
    max_tokens: int,
    live: Iterable[tuple[str, Probe]],
) -> Probe:
    """The probe of a request. Raises `InvalidRequestError` if the engine can't do what the request
    asks for, and `RateLimitError` if the tenant's `live` probes already capture too much.
    """
    if request.adapter is not None:
        _check_head(interp, request.adapter)
    attribution = interp.attribution
    if request.images and attribution is not None and attribution.method == "input_x_gradient":
        raise InvalidRequestError(
            "interp.attribution: gradients are computed for texts, and this prompt has images; use "
            "method direct."
        )
    if not isinstance(runner, Tappable) or not runner.sites:
        raise InvalidRequestError("interp: this model's backend shows no activations.")
    shape = (len(request.prompt), max_tokens, request.params.n)
    probe = Probe(interp, runner.sites, *shape)
    if request.resumed is None:  # what was taken in before an engine died had room
        _check_room(probe, request.tenant, live)
    return probe


def _check_room(probe: Probe, tenant: str, live: Iterable[tuple[str, Probe]]) -> None:
    held = [(name, each.num_bytes) for name, each in live]
    own = sum(num_bytes for name, num_bytes in held if name == tenant)
    if probe.num_bytes + own > MAX_HELD_BYTES:
        raise RateLimitError(
            f"Your other requests with interp take {own:,} bytes, this one {probe.num_bytes:,}, and"
            f" all together may take {MAX_HELD_BYTES:,}; try again later.",
            retry_after=None,
        )
    whole = probe.num_bytes + sum(num_bytes for _, num_bytes in held)
    if whole > min(MAX_ALL_HELD_BYTES, memory_room().plannable):
        raise RateLimitError(
            "The requests with interp take too much memory; try again later.", retry_after=None
        )


def _check_head(interp: InterpRequest, adapter: AdapterRef) -> None:
    """Lens and attribution compute the LM head apart from the steps, without adapters. Gradients
    compute the whole model so.
    """
    attribution = interp.attribution
    if attribution is not None and attribution.method == "input_x_gradient":
        raise InvalidRequestError(
            "interp.attribution: gradients are those of the base model, and this is an adapter; "
            "use method direct, or send the request to the base model."
        )
    if adapter.changes_head and (interp.lens is not None or attribution is not None):
        raise InvalidRequestError(
            "interp: lens and attribution would use the head of the base model, which this adapter "
            "changes; send the request to the base model."
        )
