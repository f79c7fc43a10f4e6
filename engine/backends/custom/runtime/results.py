"""What was drawn, and from there to the output of a step."""

from typing import Any, NamedTuple

import numpy as np

from engine.backends.custom.runtime.seam import F32, I32, Bools, SamplingInputs, StepOutput


class Sampled(NamedTuple):
    """Arrays of any library. What no row asked for is None."""

    tokens: Any  # (R,) integers
    logprobs: Any = None  # (R,)
    top_ids: Any = None  # (R, K)
    top_logprobs: Any = None  # (R, K)


def step_output(
    sampled: Sampled | None,
    hidden: F32 | None,
    finite: Bools,
    query_start: I32,
    sampling: SamplingInputs,
) -> StepOutput:
    """From numpy's arrays, which may be padded behind the rows, behind the alternatives (K) or, in
    `finite`, behind the tokens. `hidden` (R, D) is of all rows; `sampled` None: no row samples.
    """
    of_rows = np.logical_and.reduceat(finite[: query_start[-1]], query_start[:-1])
    count = len(sampling.slots)
    if sampled is None:
        return StepOutput(np.empty(0, np.int32), of_rows)
    tokens = sampled.tokens[:count]
    wanted = None if hidden is None else hidden[sampling.hidden_rows]
    if sampled.logprobs is None:
        return StepOutput(tokens, of_rows, hidden=wanted)
    num_top = int(sampling.num_logprobs.max())
    return StepOutput(
        tokens,
        of_rows,
        sampled.logprobs[:count],
        sampled.top_ids[:count, :num_top],
        sampled.top_logprobs[:count, :num_top],
        wanted,
    )
