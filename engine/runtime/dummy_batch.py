"""Steps without a sequence. They compile kernels before the first request, and show after a failed
step whether the runner still works.
"""

from collections.abc import Sequence

import numpy as np

from engine.runtime.model_runner import (
    NULL_BLOCK,
    SAMPLE,
    BatchInputs,
    ModelRunner,
    RunnerSpec,
    SamplingInputs,
)


def idle_inputs(spec: RunnerSpec, counts: Sequence[int]) -> BatchInputs:
    """A step without a sequence. Its rows have these numbers of tokens. Their keys and values are
    written to the null block, and their states are those of no sequence.
    """
    rows, total = len(counts), sum(counts)
    positions = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    ends = np.cumsum(counts, dtype=np.int32)
    tables = np.full((rows, -(-max(counts) // spec.block_size)), NULL_BLOCK, np.int32)
    nowhere, has_windows = np.zeros(total, np.int64), spec.window is not None
    zeros, slot = np.zeros(rows, np.int32), spec.max_slots if spec.has_state else 0
    return BatchInputs(
        token_ids=np.zeros(total, np.int32),
        positions=positions,
        write_slots=nowhere,
        query_start=np.concatenate((zeros[:1], ends)),
        seq_lens=np.array(counts, np.int32),
        num_prompt=np.array(counts, np.int32),
        block_tables=tables,
        slots=zeros + slot,
        logit_rows=ends - 1,
        adapter_ids=zeros,
        prefix_groups=zeros - 1,
        prefix_blocks=np.zeros(0, np.int32),
        window_tables=tables if has_windows else None,
        window_slots=nowhere if has_windows else None,
    )


def warm_up(runner: ModelRunner) -> None:
    """Run one step without a sequence, which computes a single token."""
    one, none = np.zeros(1, np.int32), np.zeros(0, np.int32)
    inputs = idle_inputs(runner.spec, (1,))
    off, on = np.zeros(1, np.float32), np.ones(1, np.float32)
    sampling = SamplingInputs(
        sample_rows=one,
        slots=one,
        temperature=off,
        top_k=one,
        top_p=on,
        min_p=off,
        repetition=on,
        presence=off,
        frequency=off,
        bias_rows=none,
        bias_ids=none,
        bias_values=np.zeros(0, np.float32),
        seed=np.zeros(1, np.int64),
        choice=one,
        position=np.ones(1, np.int32),
        mask=None,
        forced=np.full(1, SAMPLE, np.int32),
        hidden_rows=none,
        num_logprobs=np.full(1, -1, np.int32),
        history_slots=none,
        history_start=one,
        history_tokens=none,
        history_num_prompt=none,
    )
    runner.sample(runner.forward(inputs), sampling).wait()
