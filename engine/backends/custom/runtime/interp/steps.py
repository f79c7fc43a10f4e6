"""Connects probes with the steps of the engine: taps into a step, captured rows out of it."""

from collections.abc import Iterable
from dataclasses import replace

from engine.backends.custom.runtime.interp.probe import Probe
from engine.backends.custom.runtime.interp.taps import TapInputs, Tappable, Taps
from engine.backends.custom.runtime.model_runner import BatchInputs, ModelRunner, StepOutput
from engine.backends.custom.runtime.sequence import Row, ScheduledBatch, Sequence
from engine.core.errors import InvalidRequestError, RateLimitError
from engine.core.interfaces.interp import InterpRequest
from engine.core.interfaces.request import AdapterRef, GenerateRequest

# What the running and waiting sequences of a tenant may capture together
MAX_HELD_BYTES = 512 * 2**20


def make_probe(
    request: GenerateRequest, runner: ModelRunner, max_tokens: int, live: Iterable[Sequence]
) -> Probe | None:
    """The probe of a request. Raises `InvalidRequestError` if the engine can't do what the request
    asks for, and `RateLimitError` if the tenant's `live` sequences already capture too much.
    """
    if request.interp is None:
        return None
    if request.adapter is not None:
        _check_head(request.interp, request.adapter)
    if not isinstance(runner, Tappable) or not runner.sites:
        raise InvalidRequestError("interp: this model's backend shows no activations.")
    probe = Probe(request.interp, runner.sites, len(request.prompt), max_tokens)
    own = (each.probe for each in live if each.tenant == request.tenant)
    held = sum(each.num_bytes for each in own if each is not None)
    if probe.num_bytes and held + probe.num_bytes > MAX_HELD_BYTES:
        raise RateLimitError(
            "Your other requests capture too much at once; try again later.", retry_after=None
        )
    return probe


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


def with_taps(inputs: BatchInputs, rows: tuple[Row, ...]) -> BatchInputs:
    """The inputs of a step, with the taps of its rows."""
    found: list[Taps] = []
    widths: tuple[int, ...] = ()
    for row, first in zip(rows, inputs.query_start.tolist(), strict=False):
        probe = row.seq.probe
        taps = None if probe is None else probe.taps(row.start, row.length, first)
        if probe is not None and taps is not None:
            found.append(taps)
            widths = probe.widths
    return replace(inputs, taps=TapInputs.of(tuple(found), widths) if found else None)


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
