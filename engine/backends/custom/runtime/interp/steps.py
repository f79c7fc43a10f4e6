"""Connects probes with the steps of the engine: taps into a step, captured rows out of it."""

from dataclasses import replace

from engine.backends.custom.runtime.interp.probe import Probe
from engine.backends.custom.runtime.interp.taps import TapInputs, Tappable, Taps
from engine.backends.custom.runtime.model_runner import BatchInputs, ModelRunner, StepOutput
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


def with_taps(inputs: BatchInputs, rows: tuple[Row, ...]) -> BatchInputs:
    """The inputs of a step, with the taps of its rows."""
    found: list[Taps] = []
    widths: list[int] = []
    for row, first in zip(rows, inputs.query_start.tolist(), strict=False):
        probe = row.seq.probe
        taps = None if probe is None else probe.taps(row.start, row.length, first)
        if probe is not None and taps is not None:
            found.append(taps)
            widths = [site.width for site in probe.sites]
    return replace(inputs, taps=TapInputs.of(found, widths) if found else None)


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
