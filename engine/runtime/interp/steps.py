"""Connects probes with the steps of the engine: taps into a step, captured rows out of it."""

import logging
from collections.abc import Iterable
from dataclasses import replace

from engine.core.errors import InvalidRequestError, RateLimitError
from engine.core.interfaces.interp import InterpRequest
from engine.core.interfaces.request import AdapterRef, GenerateRequest
from engine.core.memory import memory_room
from engine.runtime.interp.probe import Probe
from engine.runtime.interp.taps import TapInputs, Tappable, Taps
from engine.runtime.model_runner import BatchInputs, ModelRunner, StepOutput
from engine.runtime.sequence import Row, ScheduledBatch, Sequence

log = logging.getLogger(__name__)

# What the sequences of a tenant may take together, and those of all tenants. Sequences whose
# results are being made count too.
MAX_HELD_BYTES = 512 * 2**20
MAX_ALL_HELD_BYTES = 4 * MAX_HELD_BYTES


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
    attribution = request.interp.attribution
    if request.images and attribution is not None and attribution.method == "input_x_gradient":
        raise InvalidRequestError(
            "interp.attribution: gradients are computed for texts, and this prompt has images; use "
            "method direct."
        )
    if not isinstance(runner, Tappable) or not runner.sites:
        raise InvalidRequestError("interp: this model's backend shows no activations.")
    shape = (len(request.prompt), max_tokens, request.params.n)
    probe = Probe(request.interp, runner.sites, *shape)
    if request.resumed is None:  # what was taken in before an engine died had room
        _check_room(probe, request.tenant, live)
    return probe


def _check_room(probe: Probe, tenant: str, live: Iterable[Sequence]) -> None:
    held = [(each.tenant, each.probe.num_bytes) for each in live if each.probe is not None]
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


def take_captures(batch: ScheduledBatch, output: StepOutput) -> list[Sequence]:
    """Give each sequence what its row captured. Returns the sequences that could not take it."""
    start = 0
    failed: list[Sequence] = []
    assert output.captured is not None
    for index, row in enumerate(batch.rows):
        seq = row.seq
        if seq.probe is None:
            continue
        count = seq.probe.num_captures(row.start, row.length)
        rows, start = output.captured[start : start + count], start + count
        if seq.finish_reason is not None or not output.finite[index]:
            continue
        try:
            seq.probe.take(row, rows)
        except Exception:  # such as a lack of memory
            log.exception("request %s could not take what it captured", seq.request_id)
            failed.append(seq)
    return failed
