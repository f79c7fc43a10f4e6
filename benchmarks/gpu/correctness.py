"""Checks that the fast path on this device agrees with the reference attention path.

In float32, every greedy token of every prompt must be the same. In bfloat16, logprobs of given
tokens (in prefill and in decode) may deviate from float32 by no more than the reference path's own
deviation times a margin. The exit status is 1 if a check fails.

    python -m benchmarks.gpu.correctness --model llama-1b
"""

import argparse
import gc
import json
import random
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import BenchEngine, shape_source, tokens_of
from benchmarks.gpu.workloads import SHAPES, Shape, Workload
from engine.ipc.options import EngineOptions
from engine.worker.memory import DTYPE_BYTES

NUM_PROMPTS = 64
NUM_NEW = 48
LONGEST, SHARED = 640, 320
REFERENCE = "reference"  # the attention backend in plain PyTorch
# Small enough that prompts are chunked, with decode rows beside them.
STEP_TOKENS = 512
MARGIN = 1.25  # times the reference's own drift in bfloat16
MAX_MEAN_DRIFT = 0.1  # nats


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs by request: of its prompt tokens, and of its generated tokens."""

    prompts: list[list[float]]
    tokens: list[list[int]]
    generated: list[list[float]]


@dataclass(frozen=True, slots=True)
class Drift:
    """How far two sets of logprobs of the same tokens differ."""

    mean: float
    largest: float
    count: int

    def __str__(self) -> str:
        return f"mean {self.mean:.5f}, largest {self.largest:.4f} over {self.count:,} tokens"


def prompts(shape: Shape) -> Workload:
    """Prompts of every length; the last third shares a prefix."""
    rng = random.Random(1)
    longest, shared_length = LONGEST // shape.divisor, SHARED // shape.divisor
    shared = [rng.randrange(shape.first_id, shape.last_id) for _ in range(shared_length)]
    lists = []
    for number in range(NUM_PROMPTS):
        length = rng.randrange(1, longest - shared_length)
        ids = [rng.randrange(shape.first_id, shape.last_id) for _ in range(length)]
        lists.append(shared + ids if 3 * number >= 2 * NUM_PROMPTS else ids)
    return Workload(lists, [max(2, NUM_NEW // shape.divisor)] * NUM_PROMPTS)


def greedy_check(model: str, device: str, attention: str) -> Check:
    """Compare every greedy token of every prompt, in float32."""
    workload = prompts(SHAPES[model])
    tokens = []
    for each in (REFERENCE, attention):
        with engine(model, device, "float32", each) as bench:
            tokens.append(tokens_of(bench.run(workload), workload))
    reference, fast = tokens
    different = [number for number in range(NUM_PROMPTS) if reference[number] != fast[number]]
    total = sum(map(len, reference))
    distinct = len({token for row in reference for token in row})
    detail = f"{NUM_PROMPTS - len(different)} of {NUM_PROMPTS} prompts equal, {total:,} tokens"
    detail += f" ({distinct:,} distinct)"
    if different:
        number = different[0]
        place = common_length(reference[number], fast[number])
        detail += f"; prompt {number} differs from token {place}"
    return Check("greedy ids, float32", not different, detail)


def drift_checks(model: str, device: str, attention: str) -> list[Check]:
    """Compare logprobs in bfloat16 with those in float32."""
    exact = scores(model, device, "float32", REFERENCE)
    plain = scores(model, device, "bfloat16", REFERENCE)
    fast = scores(model, device, "bfloat16", attention)
    checks = []
    for name, find in (("prompts", prompt_drift), ("generated", generated_drift)):
        own, ours = find(exact, plain), find(exact, fast)
        limit = min(MAX_MEAN_DRIFT, MARGIN * own.mean + 1e-4)
        detail = f"{ours}; the reference's own: {own}; limit of the mean {limit:.5f}"
        passed = ours.count > 0 and ours.mean <= limit
        checks.append(Check(f"logprob drift of {name}, bfloat16", passed, detail))
    return checks


def scores(model: str, device: str, dtype: str, attention: str, **changes: str) -> Scores:
    """`changes` are options of the engine."""
    workload = prompts(SHAPES[model])
    with engine(model, device, dtype, attention, **changes) as bench:
        scored = bench.run(workload, logprobs=0, score_prompt=True, max_tokens=1)
        generated = bench.run(workload, logprobs=0)
    asked: list[list[float]] = [[] for _ in workload.prompts]
    for _, delta in scored.answers:
        asked[int(delta.request_id)] += [each.logprob for each in delta.prompt_logprobs or ()]
    drawn: list[list[float]] = [[] for _ in workload.prompts]
    for _, delta in generated.answers:
        drawn[int(delta.request_id)] += [each.logprob for each in delta.logprobs or ()]
    return Scores(asked, tokens_of(generated, workload), drawn)


def prompt_drift(exact: Scores, other: Scores) -> Drift:
    pairs = zip(exact.prompts, other.prompts, strict=True)
    return drift([(a, b) for left, right in pairs for a, b in zip(left, right, strict=True)])


def generated_drift(exact: Scores, other: Scores) -> Drift:
    """The drift of each request's generated tokens, up to the first different token."""
    pairs = []
    for number in range(NUM_PROMPTS):
        same = common_length(exact.tokens[number], other.tokens[number])
        left, right = exact.generated[number][:same], other.generated[number][:same]
        pairs += list(zip(left, right, strict=True))
    return drift(pairs)


def drift(pairs: list[tuple[float, float]]) -> Drift:
    apart = [abs(a - b) for a, b in pairs]
    return Drift(sum(apart) / max(1, len(apart)), max(apart, default=0.0), len(apart))


def common_length(first: list[int], second: list[int]) -> int:
    for place, (a, b) in enumerate(zip(first, second, strict=True)):
        if a != b:
            return place
    return len(first)


@contextmanager
def engine(
    model: str, device: str, dtype: str, attention: str, **changes: str
) -> Iterator[BenchEngine]:
    token_bytes = shape_source(model).config.kv_bytes_per_token(DTYPE_BYTES[dtype])
    options = EngineOptions(
        model_path=model,
        framework="torch",
        device=device,
        dtype=dtype,
        attention=attention,
        max_seq_len=2 * LONGEST,
        max_slots=NUM_PROMPTS,
        pool_bytes=NUM_PROMPTS * 2 * LONGEST * token_bytes,
        max_batch_tokens=STEP_TOKENS // SHAPES[model].divisor,
        **changes,
    )
    with closing(BenchEngine(model, options)) as bench:
        yield bench
    del bench
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="llama-1b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto", help="the backend that is checked")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON with the figures")
    given: Any = parser.parse_args()
    checks = [greedy_check(given.model, given.device, given.attention)]
    checks += drift_checks(given.model, given.device, given.attention)
    for check in checks:
        print(f"{'ok    ' if check.passed else 'FAILED'} {check.name}: {check.detail}", flush=True)
    if given.output:
        given.output.write_text(json.dumps([asdict(check) for check in checks], indent=2) + "\n")
    sys.exit(not all(check.passed for check in checks))


if __name__ == "__main__":
    main()
