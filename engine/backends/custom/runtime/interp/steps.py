"""Connects probes with the steps of the engine: taps into a step, captured rows out of it."""

from engine.backends.custom.architectures.sites import Site
from engine.backends.custom.runtime.interp.probe import Probe
from engine.backends.custom.runtime.interp.taps import TapInputs, Tappable
from engine.backends.custom.runtime.model_runner import I32, ModelRunner, StepOutput
from engine.backends.custom.runtime.sequence import Row, ScheduledBatch
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.request import GenerateRequest


def make_probe(request: GenerateRequest, runner: ModelRunner, max_tokens: int) -> Probe | None:
    """The probe of a request. Raises `InvalidRequestError` if the engine can't do what the request
    asks for.
    """
    if request.interp is None:
        return None
    if not isinstance(runner, Tappable) or not runner.sites:
        raise InvalidRequestError("interp: this model's backend shows no activations.")
    return Probe(request.interp, runner.sites, len(request.prompt), max_tokens)


def step_taps(rows: tuple[Row, ...], query_start: I32) -> TapInputs | None:
    """The taps of a step, in which row i starts at token query_start[i]."""
    found, sites = [], _sites(rows)
    for row, first in zip(rows, query_start.tolist(), strict=False):
        if row.seq.probe is None:
            continue
        taps = row.seq.probe.taps(row.start, row.length, first)
        if taps is not None:
            found.append(taps)
    return TapInputs.of(found, [site.width for site in sites]) if found else None


def _sites(rows: tuple[Row, ...]) -> tuple[Site, ...]:
    return next((row.seq.probe.sites for row in rows if row.seq.probe is not None), ())


def take_captures(batch: ScheduledBatch, output: StepOutput) -> None:
    """Give each sequence what its row captured."""
    start = 0
    assert output.captured is not None
    for index, row in enumerate(batch.rows):
        seq = row.seq
        if seq.probe is None:
            continue
        count = seq.probe.num_captures(row.start, row.length)
        rows, start = output.captured[start : start + count], start + count
        if seq.finish_reason is None and output.finite[index]:
            seq.probe.take(row.start, row.length, rows)
