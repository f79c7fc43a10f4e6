"""Times of native steps by what they have: decode rows, and prompt tokens beside them.

    python -m benchmarks.kernels.steps
    python -m benchmarks.kernels.steps 8+0 8+48 24+0 --rounds 40

"8+48" is a step with 8 decode rows and 48 tokens of one prompt. All kinds of steps take turns, and
the median over the faster half of the rounds counts. So other work on the machine changes the
figures little. The last column is what the prompt adds to the decode rows alone.
"""

import argparse
import time
from dataclasses import replace
from statistics import median

import numpy as np

from engine.core.store.catalogue import DEFAULT_MODEL
from engine.core.store.model_store import resolve_model
from engine.native.execution.build import build_runner
from engine.native.execution.timing import runner_config
from engine.runtime.model_runner import BatchInputs, RunnerConfig
from engine.weights.model import open_model

KINDS = ("8+0", "16+0", "24+0", "32+0", "8+16", "8+32", "8+48", "8+64", "8+128")
LENGTH = 192  # tokens of a sequence before a decode row
PROMPT_START = 64  # tokens of the prompt that earlier steps have computed
CONTEXT = 512


def inputs(config: RunnerConfig, num_decode: int, num_prompt: int) -> BatchInputs:
    """A step over sequences of random tokens, each with its own cache blocks."""
    starts = [LENGTH] * num_decode + [PROMPT_START] * (num_prompt > 0)
    lengths = np.array([1] * num_decode + [num_prompt] * (num_prompt > 0), np.int32)
    size, rows = config.block_size, len(lengths)
    blocks = 1 + np.arange(rows * (CONTEXT // size), dtype=np.int32).reshape(rows, -1)
    spans = [np.arange(a, a + n, dtype=np.int32) for a, n in zip(starts, lengths, strict=True)]
    slots = [
        blocks[row][span // size].astype(np.int64) * size + span % size
        for row, span in enumerate(spans)
    ]
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ends = np.array(starts, np.int32) + lengths
    return BatchInputs(
        token_ids=np.random.default_rng(0).integers(0, 1000, query_start[-1], np.int32),
        positions=np.concatenate(spans),
        write_slots=np.concatenate(slots),
        query_start=query_start,
        seq_lens=ends,
        num_prompt=np.where(np.arange(rows) < num_decode, LENGTH, ends).astype(np.int32),
        block_tables=blocks,
        slots=np.arange(rows, dtype=np.int32),
        logit_rows=query_start[1:] - 1,
        adapter_ids=np.zeros(rows, np.int32),
        prefix_groups=np.full(rows, -1, np.int32),
        prefix_blocks=np.zeros(0, np.int32),
    )


def measure(model: str, kinds: list[tuple[int, int]], rounds: int) -> dict[tuple[int, int], float]:
    """Seconds of a step of each kind."""
    rows = 1 + max(num_decode for num_decode, _ in kinds)
    config = replace(runner_config(CONTEXT, rows, CONTEXT), max_seq_len=CONTEXT)
    runner = build_runner(open_model(resolve_model(model)), config)
    try:
        steps = {kind: inputs(config, *kind) for kind in kinds}
        times: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, step in steps.items():
                began = time.perf_counter()
                runner.forward(step)
                times[kind].append(time.perf_counter() - began)
    finally:
        runner.close()
    return {kind: median(sorted(each)[: -(-rounds // 2)]) for kind, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    kinds = [(int(a), int(b)) for a, b in (kind.split("+") for kind in given.kinds)]
    alone = {(rows, 0) for rows, num_prompt in kinds if rows and num_prompt}
    found = measure(given.model, sorted({*kinds, *alone}), given.rounds)
    for rows, num_prompt in kinds:
        added = found[rows, num_prompt] - (found[rows, 0] if rows and num_prompt else 0.0)
        print(f"{rows:3} +{num_prompt:4}  {1e3 * found[rows, num_prompt]:7.2f} ms", end="")
        print(f"  {1e3 * added:7.2f} ms" if num_prompt else "")


if __name__ == "__main__":
    main()
