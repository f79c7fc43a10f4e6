"""Rows whose next token is known and whose probability is wanted: a prompt's own tokens.

Such a row goes through the sampler like any other, with its token forced and everything that would
change a draw switched off.
"""

from dataclasses import replace

import numpy as np

from engine.backends.custom.runtime.model_runner import I32, SAMPLE, SamplingInputs
from engine.backends.custom.runtime.sequence import ScheduledBatch

# Value of each field for a forced row; fields that are not here keep their row's own.
_NEUTRAL = {"temperature": 0, "repetition": 1, "presence": 0, "frequency": 0}
_PER_ROW = ("top_k", "top_p", "min_p", "seed", "choice", "position", "num_logprobs")


def with_scores(drawn: SamplingInputs, batch: ScheduledBatch) -> SamplingInputs:
    """`drawn` has a row for each that draws; the result has those of `logit_rows`, in its order."""
    forced, owner, place = _layout(batch)
    is_forced = forced != SAMPLE
    # A sequence in the midst of its prompt has scored rows but draws nothing: any row's values do,
    # except for the facts that are its own.
    source = np.maximum(place, 0)
    fields = {name: getattr(drawn, name) for name in (*_NEUTRAL, *_PER_ROW)}
    if not len(drawn.slots):
        fields = {name: np.zeros(1, values.dtype) for name, values in fields.items()}
    grown = {name: values[source] for name, values in fields.items()}
    for name, value in _NEUTRAL.items():
        grown[name] = np.where(is_forced, value, grown[name]).astype(grown[name].dtype)
    rows = batch.rows
    grown["slots"] = np.array([rows[index].slot for index in owner], np.int32)
    asked = np.array([rows[index].seq.params.logprobs or 0 for index in owner], np.int32)
    grown["num_logprobs"] = np.where(is_forced, asked, grown["num_logprobs"]).astype(np.int32)
    where = np.flatnonzero(~is_forced).astype(np.int32)  # of each drawing row in the result
    mask = drawn.mask
    if mask is not None:
        wide = np.full((len(forced), mask.shape[1]), 0xFFFFFFFF, np.uint32)
        wide[where] = mask
        mask = wide
    return replace(
        drawn,
        **grown,
        sample_rows=owner,
        forced=forced,
        mask=mask,
        bias_rows=where[drawn.bias_rows],
        hidden_rows=where[drawn.hidden_rows],
    )


def _layout(batch: ScheduledBatch) -> tuple[I32, I32, I32]:
    """For each row of logits: the forced token or SAMPLE, its row in the batch, and its row among
    those that draw (-1 where its sequence does not).
    """
    forced: list[int] = []
    owner: list[int] = []
    place: list[int] = []
    num_drawn = 0
    for index, row in enumerate(batch.rows):
        if row.num_scored:
            forced += row.seq.tokens[row.start + 1 : row.start + 1 + row.num_scored]
        if row.samples:
            forced.append(SAMPLE)
        count = row.num_scored + row.samples
        owner += [index] * count
        place += [num_drawn if row.samples else -1] * count
        num_drawn += row.samples
    return (np.array(forced, np.int32), np.array(owner, np.int32), np.array(place, np.int32))
