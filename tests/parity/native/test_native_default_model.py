"""The native runner on the default model, against the oracle and against itself.

With float activations its logits equal the oracle's. With the default numerics, a request's tokens
and logits are bit-identical in any batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.text.tokenizer import Tokenizer
from engine.ir.execute import run_plan
from engine.ir.models.decoder import build_graph
from engine.ir.ops import OPS
from engine.ir.plan import Capacity, Machine
from engine.ir.planner import plan
from engine.native.execution.build import STORED, build_runner, kernels
from engine.native.execution.runner import NativeRunner, StepHandle
from engine.runtime.model_runner import (
    BatchInputs,
    RunnerConfig,
    RunnerSpec,
    StepOutput,
)
from engine.weights.model import ModelSource, open_model
from tests.parity.runner_driver import RunnerDriver, Track
from tests.support.references.ir_driver import Driver, new_state

TEXT = Path(__file__).parents[2] / "data" / "alice.txt"
BLOCK = 16
NUM_TOKENS = 5
# Rows of one token, of odd numbers, of more than the 256 that attention takes at once.
LENGTHS = (24, 1, 300, 61)
SHARED = 3  # blocks
Runners = Callable[..., NativeRunner]


@pytest.fixture(scope="module")
def source(default_model: Path) -> Iterator[ModelSource]:
    source = open_model(default_model)
    yield source
    source.close()


@pytest.fixture(scope="module")
def text_ids(source: ModelSource) -> list[int]:
    text = TEXT.read_text(encoding="ascii")
    return Tokenizer.from_gguf(source.metadata).encode(text[:8000])


@pytest.fixture(scope="module")
def runners(source: ModelSource) -> Runners:
    @cache
    def runner(dtype: str = STORED, num_threads: int = 2, kv_dtype: str = "auto") -> NativeRunner:
        config = RunnerConfig(
            device="cpu",
            dtype=dtype,
            block_size=BLOCK,
            num_blocks=128,
            max_slots=16,
            max_seq_len=512,
            num_threads=num_threads,
            max_batch_tokens=1024,
            kv_dtype=kv_dtype,
        )
        return build_runner(source, config)

    return runner


@pytest.fixture(scope="module")
def prompts(text_ids: list[int]) -> list[list[int]]:
    starts = np.cumsum([0, *LENGTHS[:-1]]).tolist()
    return [text_ids[start : start + n] for start, n in zip(starts, LENGTHS, strict=True)]


class Watched:
    """A runner that keeps the logits of its last step."""

    def __init__(self, runner: NativeRunner) -> None:
        self._runner = runner
        self.sample = runner.sample
        self.logits = np.empty((0, 0), np.float32)

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def forward(self, inputs: BatchInputs) -> StepHandle:
        handle = self._runner.forward(inputs)
        self.logits = self._runner.logits(handle)
        return handle


class Requests(RunnerDriver):
    """Keeps what each of a track's tokens was drawn from."""

    def __init__(self, runner: NativeRunner) -> None:
        super().__init__(Watched(runner))
        self.cascade = 0  # leading blocks that all rows share, to be read once for all
        self._logits: dict[int, list[np.ndarray]] = {}

    def inputs(self, work: Sequence[tuple[Track, int]]) -> BatchInputs:
        made = super().inputs(work)
        if not self.cascade:
            return made
        groups = np.zeros(len(work), np.int32)
        return replace(made, prefix_groups=groups, prefix_blocks=np.array([self.cascade], np.int32))

    def step(self, work: Sequence[tuple[Track, int]], **sampling: Any) -> StepOutput:
        before = [len(track.tokens) for track, _ in work]
        output = super().step(work, **sampling)
        assert output.finite.all()
        drew = [
            track
            for (track, _), count in zip(work, before, strict=True)
            if len(track.tokens) > count
        ]
        for track, logits in zip(drew, self.runner.logits, strict=True):
            self._logits.setdefault(track.slot, []).append(logits)
        return output

    def results(self, tracks: Sequence[Track]) -> list[tuple[list[int], np.ndarray]]:
        """The tokens that each track was given, and the logits that they come from."""
        return [
            (track.tokens[track.num_prompt :], np.stack(self._logits[track.slot]))
            for track in tracks
        ]

    def finish(self, tracks: Sequence[Track], chunk: int = 1 << 30) -> list:
        self.generate(tracks, NUM_TOKENS, chunk)
        return self.results(tracks)


def alone(runner: NativeRunner, prompts: Sequence[list[int]]) -> list:
    found = []
    for prompt in prompts:
        driver = Requests(runner)
        found += driver.finish([driver.add(prompt)])
    return found


@pytest.fixture(scope="module")
def expected(runners: Runners, prompts: list[list[int]]) -> list:
    """Every prompt by itself, whole."""
    return alone(runners(), prompts)


def check_identical(found: list, expected: list) -> None:
    for (tokens, logits), (expected_tokens, expected_logits) in zip(found, expected, strict=True):
        assert tokens == expected_tokens
        np.testing.assert_array_equal(logits, expected_logits)


def all_logits(runner: NativeRunner, tokens: list[int], num_prompt: int) -> np.ndarray:
    """Of every position, in one step."""
    driver = RunnerDriver(runner)
    track = driver.add(tokens)
    track.num_prompt = num_prompt
    rows = np.arange(len(tokens), dtype=np.int32)
    inputs = replace(driver.inputs([(track, len(tokens))]), logit_rows=rows)
    return runner.logits(runner.forward(inputs))


def test_float_logits_equal_the_oracle(
    source: ModelSource, runners: Runners, prompts: list[list[int]]
) -> None:
    tokens = prompts[0]
    weights = {name: weight.numpy() for name, weight in source.weights.items()}
    made = plan(build_graph(source.config), Capacity(32, 32), Machine(threads=2))
    oracle = Driver(
        lambda batch, state: run_plan(made, weights, batch, state), new_state(source.config)
    )
    wanted = oracle.step([(oracle.add(tokens), len(tokens))], every_token=True)
    found = all_logits(runners("float32"), tokens, len(tokens))
    tolerance = OPS["projection"].tolerances["f32"]
    assert tolerance.accepts(found, wanted), tolerance.worst(found, wanted)


def test_batched_requests_are_bit_identical_to_requests_run_alone(
    runners: Runners, prompts: list[list[int]], expected: list
) -> None:
    """The second half joins while the first half is answered, its prompts in chunks."""
    driver = Requests(runners())
    tracks = [driver.add(prompt) for prompt in prompts]
    driver.generate(tracks[:2], 2)
    check_identical(driver.finish(tracks[::-1], chunk=37)[::-1], expected)


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunked_prefill_is_bit_identical_to_whole_prefill(
    runners: Runners, prompts: list[list[int]], expected: list, chunk: int
) -> None:
    for index in (2, 3):
        driver = Requests(runners())
        check_identical(driver.finish([driver.add(prompts[index])], chunk), [expected[index]])


def test_a_preempted_request_continues_bit_identically(
    runners: Runners, prompts: list[list[int]], expected: list
) -> None:
    """Prompt and answer so far are computed again in one step, beside the others."""
    driver = Requests(runners())
    for prompt, (tokens, logits) in zip(prompts, expected, strict=True):
        again, other = driver.add(prompt + tokens[:3]), driver.add(prompts[0])
        again.num_prompt = len(prompt)
        ((found, rest), _) = driver.finish([again, other])
        assert found == tokens
        np.testing.assert_array_equal(rest, logits[3:])


@pytest.mark.parametrize("cascade", [0, SHARED])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_cached_prefix_gives_bit_identical_results_to_a_cold_one(
    runners: Runners, text_ids: list[int], cascade: int, kv_dtype: str
) -> None:
    prefix = text_ids[: SHARED * BLOCK]
    texts = [prefix + text_ids[900 : 900 + length] for length in (1, 9, 40)]
    runner = runners(kv_dtype=kv_dtype)
    cold = alone(runner, texts)
    driver = Requests(runner)
    first = driver.add(prefix)
    driver.step([(first, len(prefix))])
    driver.cascade = cascade
    tracks = [driver.add(text, prefix=first, shared=SHARED) for text in texts]
    check_identical(driver.finish(tracks), cold)


def test_one_thread_gives_the_same_bits_as_two(
    runners: Runners, prompts: list[list[int]], expected: list
) -> None:
    chosen = (0, 3)
    found = alone(runners(num_threads=1), [prompts[index] for index in chosen])
    check_identical(found, [expected[index] for index in chosen])


def test_seeded_sampling_does_not_depend_on_the_batch(
    runners: Runners, prompts: list[list[int]]
) -> None:
    def draw(chosen: Sequence[int]) -> list[list[int]]:
        driver = Requests(runners())
        tracks = [driver.add(prompts[index]) for index in chosen]
        many = len(chosen)
        for _ in range(NUM_TOKENS):
            driver.step(
                [(track, len(track.tokens) - track.num_computed) for track in tracks],
                temperature=[1.0] * many,
                top_p=[0.95] * many,
                seed=[100 + index for index in chosen],
            )
        return [tokens for tokens, _ in driver.results(tracks)]

    together = draw(range(len(prompts)))
    assert together == [draw([index])[0] for index in range(len(prompts))]
    greedy = [tokens for tokens, _ in alone(runners(), prompts[:1])]
    assert together[:1] != greedy


@pytest.mark.parametrize("as_prompt", [True, False], ids=["prompt", "generated"])
def test_default_numerics_stay_near_float(
    runners: Runners, prompts: list[list[int]], as_prompt: bool
) -> None:
    """Root mean square of the error of all logits, relative to that of the logits."""
    tokens = prompts[3]
    exact = all_logits(runners("float32"), tokens, len(tokens))
    found = all_logits(runners(), tokens, len(tokens) if as_prompt else 0)
    native = kernels()
    rounds_to_bf16 = as_prompt and native.has_bf16(native.instruction_sets()[-1])
    error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    assert 0 < error < (0.02 if rounds_to_bf16 else 0.045)


def test_a_short_question_gets_the_same_answer_as_in_float(
    runners: Runners, source: ModelSource
) -> None:
    """Two first tokens are almost equally likely here. Outliers of the chat template decide."""
    messages = [
        ("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
        ("user", "What is the capital of France?"),
    ]
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    tokenizer = Tokenizer.from_gguf(source.metadata)
    prompt = tokenizer.encode(f"{said}<|im_start|>assistant\n", parse_special=True)
    (found, _), (exact, _) = (alone(runners(dtype), [prompt])[0] for dtype in (STORED, "float32"))
    assert found == exact
    assert tokenizer.decode(exact).startswith("The capital of France")
