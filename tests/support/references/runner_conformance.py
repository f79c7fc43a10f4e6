"""The contract of every `ModelRunner`, as tests over the real scheduler, cache and loop.

Subclass `RunnerConformance` in a test module and implement `make_runner`; pytest finds the rest:

    class TestMyRunner(RunnerConformance):
        nan_token = 50

        @classmethod
        def make_runner(cls) -> ModelRunner: ...

        @classmethod
        def logits(cls, tokens) -> F32: ...

All tests of a class share one runner, so each starts with a cache full of other requests' keys and
values. A request must give the same tokens in any batch as it gives when it runs alone.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from engine.core.interfaces.request import (
    Abort,
    GenerateRequest,
    SamplingParams,
)
from engine.runtime.model_runner import F32, SAMPLE, ModelRunner, SamplingInputs
from engine.runtime.samplers.host_sampler import HostSampler
from engine.runtime.tiers.host import HostTier
from engine.runtime.tiers.kv_tiers import BlockMover, attach_tiers
from tests.support.references.conformance_bench import NUM_NEW, Bench, Outcome, Schedule
from tests.support.references.sampler_reference import Reference
from tests.support.toy_engine.tiers import InlineMover

# Max difference of logprobs and states between two schedules, in float32.
TOLERANCE = 1e-3
DRAWN: Mapping[str, Any] = {
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "logprobs": 2,
}
# One for each slot that draws on and on beside the others; more of them than there are slots.
STEADY: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.3, "top_k": 5, "seed": 2, "max_tokens": 9},
    {"temperature": 1.1, "top_p": 0.7, "seed": 3, "logprobs": 0},
    {"temperature": 1.5, "min_p": 0.2, "seed": 4, "max_tokens": 14},
    {"temperature": 0.8, "repetition_penalty": 1.4, "seed": 5},
    {"temperature": 0.0, "presence_penalty": 0.9, "frequency_penalty": 0.6, "logprobs": 1},
    {**DRAWN, "seed": 2**62 + 1, "n": 2, "max_tokens": 17},
    {"temperature": 0.9, "logit_bias": {7: 4.0, 11: -6.0}, "seed": 6},
    {"temperature": 1.0, "stop_token_ids": (5, 9, 13), "min_tokens": 20, "seed": 7},
    {"temperature": 0.0, "repetition_penalty": 0.7, "frequency_penalty": -0.2},
)
# Parameters that the host samples by, or that become biases and masks in each step.
CHAINS: tuple[Mapping[str, Any], ...] = (
    {"typical_p": 0.6, "temperature": 1.2, "logprobs": 1},
    {"top_n_sigma": 0.9, "temperature": 1.4},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02, "temperature": 0.8, "n": 2},
    {"mirostat": 1, "mirostat_tau": 2.0, "temperature": 1.1},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.4, "temperature": 1.0, "n": 2},
    {"min_keep": 4, "top_p": 0.2, "min_p": 0.3, "temperature": 1.0},
    {"dynatemp_range": 0.7, "dynatemp_exponent": 1.5, "temperature": 1.0, "top_k": 20},
    {"repetition_penalty": 1.6, "presence_penalty": 0.4, "repeat_last_n": 3, "temperature": 0.7},
    {"samplers": ("penalties", "min_p", "temperature", "top_k"), "min_p": 0.05, "top_k": 9},
    {"dry_multiplier": 3.0, "dry_allowed_length": 1, "temperature": 0.0},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "typical_p": 0.7, "temperature": 0.6},
    {"allowed_token_ids": (4, 5, 6, 7, 8), "temperature": 1.0, "dry_multiplier": 2.0},
    {"allowed_token_ids": (4, 5, 6, 7, 8), "temperature": 0.9, "xtc_probability": 0.7},
)
NUM_STEADY = 24


def drawing(request: GenerateRequest, choice: int, drawn: Sequence[int]) -> SamplingInputs:
    """How each of the tokens was to be chosen: a row and a slot for each, with its history."""
    params, count = request.params, len(drawn)
    before = [[*request.prompt, *drawn[:index]] for index in range(count)]
    bias = [(row, *each) for row in range(count) for each in params.logit_bias.items()]
    bias += [
        (row, token, float("-inf"))
        for row in range(min(count, params.min_tokens))
        for token in params.stop_token_ids
    ]

    def every(value: float, dtype: type = np.float32) -> Any:
        return np.full(count, value, dtype)

    return SamplingInputs(
        sample_rows=np.arange(count, dtype=np.int32),
        slots=np.arange(count, dtype=np.int32),
        temperature=every(params.temperature),
        top_k=every(params.top_k, np.int32),
        top_p=every(params.top_p),
        min_p=every(params.min_p),
        repetition=every(params.repetition_penalty),
        presence=every(params.presence_penalty),
        frequency=every(params.frequency_penalty),
        bias_rows=np.array([each[0] for each in bias], np.int32),
        bias_ids=np.array([each[1] for each in bias], np.int32),
        bias_values=np.array([each[2] for each in bias], np.float32),
        seed=every(params.seed or 0, np.int64),
        choice=every(choice, np.int32),
        position=np.arange(count, dtype=np.int32) + np.int32(len(request.prompt)),
        mask=None,
        forced=every(SAMPLE, np.int32),
        hidden_rows=np.zeros(0, np.int32),
        num_logprobs=every(-1 if params.logprobs is None else params.logprobs, np.int32),
        history_slots=np.arange(count, dtype=np.int32),
        history_start=np.cumsum([0, *map(len, before)], dtype=np.int32),
        history_tokens=np.array([token for each in before for token in each], np.int32),
        history_num_prompt=every(len(request.prompt), np.int32),
    )


def tokens(outcomes: Mapping[tuple[str, int], Outcome]) -> dict[tuple[str, int], list[int]]:
    return {key: outcome.tokens for key, outcome in outcomes.items()}


class RunnerConformance:
    """The contract's tests. The runner needs at least 8 slots, 40 blocks and 96 positions."""

    # A token whose embedding is not finite and that is never sampled; None: there is none.
    nan_token: ClassVar[int | None] = None
    runner: ClassVar[ModelRunner]
    alone: ClassVar[dict[tuple[str, int], Outcome]]

    @classmethod
    def make_runner(cls) -> ModelRunner:
        raise NotImplementedError

    @classmethod
    def logits(cls, tokens: Sequence[int]) -> F32:
        """What another implementation of the model gives behind each token, (T, V) float32."""
        raise NotImplementedError

    @classmethod
    def setup_class(cls) -> None:
        cls.runner = cls.make_runner()
        cls.alone = {}
        for request in cls.requests():
            cls.alone |= cls.serve([request], Schedule(max_slots=1, shares=False))

    @classmethod
    def teardown_class(cls) -> None:
        cls.runner.close()

    @classmethod
    def serve(
        cls, requests: Sequence[GenerateRequest], schedule: Schedule
    ) -> dict[tuple[str, int], Outcome]:
        return Bench(cls.runner, schedule).run(requests)

    @classmethod
    def text(cls, length: int, seed: int) -> list[int]:
        usable = [token for token in range(3, cls.runner.spec.vocab_size) if token != cls.nan_token]
        return random.Random(seed).choices(usable, k=length)

    @classmethod
    def request(cls, name: str, prompt: Sequence[int], **params: Any) -> GenerateRequest:
        fields = {"temperature": 0.0, "max_tokens": NUM_NEW, "ignore_eos": True} | params
        pools = fields.pop("pools", False)
        if cls.nan_token is not None:
            banned = {cls.nan_token: float("-inf")}
            fields["logit_bias"] = fields.get("logit_bias", {}) | banned
        return GenerateRequest(
            request_id=name, prompt=tuple(prompt), params=SamplingParams(**fields), pools=pools
        )

    @classmethod
    def requests(cls) -> list[GenerateRequest]:
        """Greedy and sampled requests, with and without a shared prefix; one has two choices."""
        shared = cls.text(2 * cls.runner.spec.block_size, seed=90)
        tails = [cls.text(length, seed) for seed, length in enumerate((1, 3, 9, 14))]
        found = [cls.request(f"greedy {i}", shared + tail) for i, tail in enumerate(tails)]
        found += [
            cls.request(f"drawn {i}", tail, **DRAWN, seed=i) for i, tail in enumerate(tails[1:])
        ]
        return [*found, cls.request("both", shared, **DRAWN, seed=7, n=2)]

    def check(self, outcomes: Mapping[tuple[str, int], Outcome], schedule: str) -> None:
        expected = tokens(self.alone)
        found = {key: value for key, value in tokens(outcomes).items() if key in expected}
        assert found == expected, schedule

    def test_batched_requests_equal_requests_run_alone(self) -> None:
        assert all(len(found) == NUM_NEW for found in tokens(self.alone).values())
        self.check(self.serve(self.requests(), Schedule()), "together")
        without = Schedule(shares=False)
        self.check(self.serve(self.requests()[::-1], without), "backwards, without sharing")

    def test_chunked_prefill_equals_whole_prefill(self) -> None:
        self.check(self.serve(self.requests(), Schedule(budget=8)), "in chunks")

    def test_a_cached_prompt_gives_the_same_tokens_as_a_cold_one(self) -> None:
        bench = Bench(self.runner, Schedule())
        bench.run(self.requests())
        bench.channel.outcomes = {}
        again = bench.run(self.requests())
        self.check(again, "cached")
        assert again["greedy 3", 0].num_cached >= 2 * self.runner.spec.block_size

    def test_blocks_loaded_from_a_tier_are_bit_identical(self) -> None:
        """To the last bit: they are written to other blocks than those that they were read from."""
        runner = self.runner
        if not isinstance(runner, BlockMover):
            assert "tinygrad" in type(runner).__module__
            return
        bench = Bench(runner, Schedule())
        host = HostTier(2**30, "lru", None)
        tiers = attach_tiers(
            bench.scheduler.kv,
            runner,
            runner.spec,
            [host],
            b"",
            lambda count: None,
            "full",
            InlineMover,
        )
        bench.run(self.requests())
        bench.channel.outcomes = {}
        bench.scheduler.kv.flush()
        others = [self.request(f"other {i}", self.text(20, seed=60 + i)) for i in range(4)]
        self.check(bench.run([*others, *self.requests()]), "from a tier")
        assert bench.channel.outcomes["greedy 3", 0].num_cached >= 2 * runner.spec.block_size
        assert tiers.mover.tiers[0].num_hits >= 2

    def test_preempted_sequences_continue_with_the_same_tokens(self) -> None:
        """Four sequences start with one block each, then outgrow a pool that fits only one of
        them.
        """
        size = self.runner.spec.block_size
        length = 2 * size + 2
        growing = [
            self.request(f"growing {i}", self.text(size - 1, seed=i), max_tokens=length)
            for i in range(4)
        ]
        plenty = self.serve(growing, Schedule())
        bench = Bench(self.runner, Schedule(num_blocks=9, shares=False))
        assert tokens(bench.run(growing)) == tokens(plenty)
        assert bench.scheduler.num_preemptions > 0

    def test_sampling_depends_only_on_seed_choice_and_position(self) -> None:
        one, other = tokens(self.alone)["both", 0], tokens(self.alone)["both", 1]
        assert one != other, "two choices drew the same"
        prompt = self.requests()[-1].prompt
        again = self.request("again", prompt, **DRAWN, seed=7)
        mates = [self.request(f"mate {i}", prompt, **DRAWN, seed=100 + i) for i in range(5)]
        found = tokens(self.serve([*mates, again], Schedule()))
        assert found["again", 0] == one
        assert len({tuple(drawn) for drawn in found.values()}) > 1, "seeds change nothing"

    def test_device_sampling_equals_the_host_sampler_over_many_steps(self) -> None:
        """Many steps in a row, each row with parameters of its own, slots changing hands."""
        asked = [
            self.request(
                f"steady {i}", self.text(3 + 2 * i, seed=i), **{"max_tokens": NUM_STEADY, **each}
            )
            for i, each in enumerate(STEADY)
        ]
        outcomes = self.serve(asked, Schedule())
        for request in asked:
            for choice in range(request.params.n):
                self.check_draws(request, choice, outcomes[request.request_id, choice])

    def check_draws(self, request: GenerateRequest, choice: int, found: Outcome) -> None:
        first, params = len(request.prompt) - 1, request.params
        logits = self.logits([*request.prompt, *found.tokens[:-1]])[first:]
        sampler = HostSampler(self.runner.spec.vocab_size)
        expected = sampler.sample(logits, drawing(request, choice, found.tokens))
        assert found.tokens == expected.tokens.tolist(), (request.request_id, choice)
        is_stopped = found.tokens[-1] in params.stop_token_ids
        assert is_stopped or len(found.tokens) == params.max_tokens
        if params.logprobs is None:
            assert not found.logprobs
            return
        chosen = [each.logprob for each in found.logprobs]
        np.testing.assert_allclose(chosen, expected.logprobs, atol=TOLERANCE)
        assert [list(each.top_ids) for each in found.logprobs] == expected.top_ids.tolist()
        top = [each.top_logprobs for each in found.logprobs]
        np.testing.assert_allclose(top, expected.top_logprobs, atol=TOLERANCE)

    def test_llama_cpp_sampler_chains_equal_the_reference(self) -> None:
        """All of them together, among rows that the device samples, and with too little memory."""
        asked = [
            self.request(
                f"chain {i}",
                self.text(2, seed=i) * 2,
                **{"max_tokens": NUM_STEADY, "seed": 50 + i, **each},
            )
            for i, each in enumerate(CHAINS)
        ]
        usual = self.requests()
        outcomes = self.serve([*asked[::2], *usual, *asked[1::2]], Schedule())
        self.check(outcomes, "among rows that the host samples")
        bench = Bench(self.runner, Schedule(num_blocks=12, shares=False))
        assert tokens(bench.run(asked)) == {
            key: found for key, found in tokens(outcomes).items() if key[0].startswith("chain")
        }
        assert bench.scheduler.num_preemptions > 0
        for request in asked:
            for choice in range(request.params.n):
                self.check_chain(request, choice, outcomes[request.request_id, choice].tokens)

    def check_chain(self, request: GenerateRequest, choice: int, found: list[int]) -> None:
        params, first = request.params, len(request.prompt) - 1
        assert params.seed is not None
        reference = Reference(params, request.prompt, params.seed, choice)
        for row in self.logits([*request.prompt, *found[:-1]])[first:]:
            reference.next_token(row)
        assert found == reference.output, (request.request_id, choice)

    def test_an_abort_does_not_affect_other_requests(self) -> None:
        bench = Bench(self.runner, Schedule(max_slots=4))
        bench.turn(*self.requests())
        for _ in range(3):
            bench.turn()
        bench.turn(Abort("greedy 1"), Abort("both", 1))
        outcomes = bench.finish()
        for key, expected in tokens(self.alone).items():
            found = outcomes[key]
            if found.finish_reason == "abort":
                assert found.tokens == expected[: len(found.tokens)]
            else:
                assert found.tokens == expected
        assert outcomes["greedy 1", 0].finish_reason == "abort"

    def test_a_nonfinite_row_affects_no_other_request(self) -> None:
        """Neither the other rows of the batch nor later users of its blocks are affected."""
        if self.nan_token is None:
            return
        prompt = self.text(20, seed=5)
        prompt[11] = self.nan_token
        sick = [self.request(f"sick {i}", prompt[: 12 + i]) for i in range(3)]
        bench = Bench(self.runner, Schedule())
        outcomes = bench.run([sick[0], *self.requests()[:4], *sick[1:], *self.requests()[4:]])
        self.check(outcomes, "among sick ones")
        assert {outcomes[f"sick {i}", 0].finish_reason for i in range(3)} == {"error"}
        bench.channel.outcomes = {}
        self.check(bench.run(self.requests()), "after sick ones")

    def test_logprobs_are_the_models_before_sampling_parameters(self) -> None:
        """A greedy row's token is the likeliest; a bias changes the choice but not the logprobs."""
        prompt = self.text(9, seed=3)
        plain = self.request("plain", prompt, logprobs=2, max_tokens=1)
        best = self.serve([plain], Schedule())["plain", 0].logprobs[0]
        assert best.logprob == best.top_logprobs[0] > best.top_logprobs[1]
        second = best.top_ids[1]
        biased = GenerateRequest(
            request_id="biased",
            prompt=plain.prompt,
            params=SamplingParams(
                temperature=0.0, max_tokens=1, logprobs=2, logit_bias={second: 1e4}
            ),
        )
        outcome = self.serve([biased], Schedule())["biased", 0]
        assert outcome.tokens == [second]
        assert abs(outcome.logprobs[0].logprob - best.top_logprobs[1]) < TOLERANCE

    def test_prompt_logprobs_and_vectors_do_not_depend_on_the_schedule(self) -> None:
        prompt = self.text(40, seed=4)
        asked = [
            self.request("scores", prompt, logprobs=1, score_prompt=True, max_tokens=1),
            self.request("vector", prompt, pools=True),
        ]
        whole, cut = (self.serve(asked, Schedule(budget=budget)) for budget in (32, 8))
        scores = [[score.logprob for score in each["scores", 0].scores] for each in (whole, cut)]
        assert len(scores[0]) == len(prompt) - 1
        np.testing.assert_allclose(scores[0], scores[1], atol=TOLERANCE)
        vectors = [
            np.frombuffer(each["vector", 0].vector or b"", np.float32) for each in (whole, cut)
        ]
        assert len(vectors[0])
        np.testing.assert_allclose(vectors[0], vectors[1], atol=TOLERANCE)
