"""Interpretability requests with hostile sizes: each is refused or answered, none ends the engine,
and the memory account is never below what is sent back.
"""

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.core.errors import EngineError
from engine.core.interfaces.interp import AttentionPattern, Attribution, Edit, InterpRequest, Lens
from engine.core.interfaces.request import Deltas, TokenDelta
from engine.core.interp.resolving import resolved
from engine.core.interp.results import InterpResult
from engine.core.interp.spec import parse_interp
from engine.core.interp.vectors import VectorStore
from engine.core.memory import MemoryRoom
from engine.core.sandbox.liveness import UNKNOWN_STEP_TIMEOUT_S
from engine.ipc.transport import encode_frame
from engine.library.steering import tensors_of
from engine.runtime.interp import probe as probe_module
from engine.runtime.interp.probe import Probe
from engine.runtime.interp.reports import PIECE_BYTES, Reports
from engine.runtime.interp.steps import Probes
from tests.parity import tiny_models
from tests.support.toy_engine.probed_engine import ProbedEngine, request

WIDTH = tiny_models.COMMON["hidden_size"]
SITE = "blocks.1.hook_resid_post"
MAX_BYTES = 2 * 2**20
CASES = 40
# What a refused request is told; anything else is a fault of the engine
REFUSALS = {"invalid_request", "not_found", "payload_too_large", "rate_limit_exceeded"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProbedEngine]:
    _, path = tiny_models.save("llama", tmp_path_factory.mktemp("tiny"))
    made = ProbedEngine(path, "native", max_batch_tokens=64)
    yield made
    made.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> VectorStore:
    made, rng = VectorStore(tmp_path_factory.mktemp("vectors")), np.random.default_rng(0)

    def tensor(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    made.save("calm", tensors_of({SITE: tensor(WIDTH)}), {})
    made.save("wrong", tensors_of({SITE: tensor(3)}), {})
    sae = {"W_enc": tensor(WIDTH, 300), "W_dec": tensor(300, WIDTH), "b_dec": tensor(WIDTH)}
    made.save("sae", tensors_of(sae), {"site": SITE})
    lens = {f"{n}.weight": tensor(WIDTH, WIDTH) for n in range(3)}
    made.save("tuned", tensors_of(lens), {})
    made.save("narrow", tensors_of({"0.weight": tensor(4, 4)}), {})
    return made


def positions(rng: Random) -> Any:
    count = rng.choice([0, 1, 7, 500, 32_000])
    return rng.choice(
        [
            "all",
            "last",
            [0] * count,
            [rng.randrange(-60, 60) for _ in range(count)],
            [2**24 - n for n in range(count)],
            list(range(-count, 0)),
        ]
    )


def span(rng: Random) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if rng.random() < 0.8:
        made["positions"] = positions(rng)
    if rng.random() < 0.4:
        made["phase"] = rng.choice(["both", "prompt", "decode"])
    return made


def numbers(rng: Random, most: int) -> list[int]:
    chosen = [rng.randrange(most) for _ in range(rng.choice([0, 1, 1, 3, 1000]))]
    return rng.choice([chosen, chosen, [0] * len(chosen), [*chosen, 1024]])


def hostile(rng: Random, sites: list[str]) -> dict[str, Any]:
    """An `interp` object over all fields."""
    raw: dict[str, Any] = {}
    often = rng.choice([0.15, 0.5])  # few parts are answered, and many are refused
    if rng.random() < often:
        count = rng.choice([1, 2, 40, 4096, 4097])
        one = {"site": rng.choice(sites)} | span(rng)
        several = [{"site": rng.choice(sites)} | span(rng) for _ in range(min(count, 20))]
        raw["capture"] = rng.choice([[one] * count, several])
    if rng.random() < often:
        raw["edit"] = [edit(rng, sites) for _ in range(rng.choice([1, 1, 2, 30, 257]))]
    if rng.random() < often:
        tuned = rng.choice([None, None, "tuned", "narrow", "none"])
        layers = rng.choice(["all", numbers(rng, 4)])
        raw["lens"] = {"layers": layers, "top": rng.choice([1, 5, 100, 101])} | span(rng)
        raw["lens"] |= {} if tuned is None else {"tuned": tuned}
    if rng.random() < often:
        raw["attention"] = {"layers": numbers(rng, 4)} | span(rng)
        if rng.random() < 0.5:
            raw["attention"]["heads"] = numbers(rng, 5)
    if rng.random() < often:
        raw["features"] = {"sae": rng.choice(["sae", "calm"]), "top": rng.choice([1, 100])}
        raw["features"] |= {"site": SITE} | span(rng)
    if rng.random() < often:
        raw["attribution"] = {
            "target": rng.choice([None, 5, 2**31 - 1]),
            "position": rng.choice([-1, 0, 2**24, -(2**24)]),
            "method": rng.choice(["direct", "input_x_gradient"]),
        }
    return raw


def edit(rng: Random, sites: list[str]) -> dict[str, Any]:
    site = rng.choice([SITE, SITE, rng.choice(sites)])
    made = {"site": site, "scale": rng.choice([0.0, 1.0, -1e30])} | span(rng)
    op = rng.choice(["add", "scale", "set", "project_out", "ablate", "patch", "clamp"])
    if op == "patch":
        source = {"id": "earlier", "site": SITE, "positions": positions(rng)}
        return made | {"op": op, "from": source}
    if op == "clamp":
        return made | {"op": op, "sae": "sae", "feature": rng.choice([0, 299, 300, 2**31 - 1])}
    if op in ("add", "set", "project_out"):
        count = rng.choice([WIDTH, WIDTH, 0, 5000])
        made["vector"] = rng.choice(["calm", "wrong", [0.0] * count, [1.5] * count])
    return made | {"op": op}


@pytest.fixture(scope="module")
def earlier(engine: ProbedEngine) -> InterpResult:
    """A result to patch from."""
    return InterpResult(engine.run(request("e", tiny_models.text(40), sites=(SITE,)))["e"].data)


@pytest.mark.parametrize("seed", range(3))
def test_random_hostile_interp_requests_do_not_end_the_engine(
    engine: ProbedEngine, store: VectorStore, earlier: InterpResult, seed: int
) -> None:
    rng = Random(seed)
    sites = [site.name for site in engine.runner.sites] + ["blocks.9.hook_resid_post"]
    good = request("good", tiny_models.text(9), num_new=3, logprobs=1)
    expected, answered = engine.run(good)["good"], 0
    for case in range(CASES):
        raw = hostile(rng, sites)
        try:
            interp = resolved(parse_interp(raw), store, lambda _: earlier, MAX_BYTES)
        except EngineError as error:
            assert error.error_code in REFUSALS, (case, error)
            continue
        num_new, prompt = rng.choice([1, 1, 8]), tiny_models.text(rng.choice([1, 20, 90]))
        each = request("bad", prompt, interp=interp, num_new=num_new)
        assert encode_frame(each)
        found = engine.run(each, good)
        assert found["good"].logprobs == expected.logprobs, (case, raw)
        answer = found["bad"]
        assert answer.error is None or answer.error_code in REFUSALS, (case, answer.error)
        if answer.error is None and interp.reads:
            answered += 1
            probe = Probe(interp, engine.runner.sites, len(prompt), num_new)
            assert len(answer.data) <= probe.num_bytes <= MAX_BYTES
            for encoding in ("float", "base64", "none"):
                assert InterpResult(answer.data).body(encoding)
            assert all(len(d.captured or b"") <= PIECE_BYTES for d in answer.deltas)
            assert all(encode_frame(Deltas((d,))) for d in answer.deltas)
    assert answered >= 1, "some requests have to be answered"


@pytest.mark.parametrize(
    "raw",
    [
        {"attention": {"layers": [0, 1, 2], "positions": "all"}},
        {"lens": {"layers": "all", "top": 100, "positions": "all"}},
        {"capture": [{"site": SITE}] * 4096},
        {"capture": [{"site": f"blocks.{n}.mlp.hook_post"} for n in range(3)] * 100},
        {"edit": [{"site": SITE, "op": "patch", "from": {"id": "e", "positions": [0] * 32_000}}]},
        {"lens": {"tuned": "tuned", "positions": [-1]}},
    ],
    ids=["attention", "lens", "the same captures", "captures", "patch", "tuned"],
)
def test_each_part_of_an_interp_request_is_size_checked_before_it_runs(
    engine: ProbedEngine, store: VectorStore, earlier: InterpResult, raw: dict[str, Any]
) -> None:
    """The refusal says how large it would be, how large it may be, and which setting says so."""
    try:
        interp = resolved(parse_interp(raw), store, lambda _: earlier, 30_000)
        answer = engine.run(request("r", tiny_models.text(100), interp=interp))["r"]
        message, code = answer.error or "", answer.error_code
    except EngineError as error:
        message, code = error.message, error.error_code
    assert code == "invalid_request"
    assert "would take" in message and "30,000 (interp.max_capture_mb)" in message, message


@pytest.mark.parametrize("target", [tiny_models.COMMON["vocab_size"], 2**31 - 1])
@pytest.mark.parametrize("method", ["direct", "input_x_gradient"])
def test_an_attribution_to_a_token_that_does_not_exist_is_refused(
    engine: ProbedEngine, target: int, method: Any
) -> None:
    interp = InterpRequest(attribution=Attribution(target, -1, method))
    answer = engine.run(request("r", tiny_models.text(5), interp=interp))["r"]
    assert answer.error_code == "invalid_request" and "Token ids" in str(answer.error)


def test_the_number_of_logit_lens_rows_is_bounded(engine: ProbedEngine, monkeypatch: Any) -> None:
    """They cost the steps of other requests time, even if their result is small."""
    monkeypatch.setattr("engine.runtime.interp.sizes.MAX_LENS_ROWS", 3 * 40)
    lens = InterpRequest(lens=Lens((), 1))
    for count, code in ((40, None), (41, "invalid_request")):
        answer = engine.run(request("r", tiny_models.text(count), interp=lens))["r"]
        assert (answer.error_code or None) == code, answer.error


def test_edits_that_overflow_to_nonfinite_are_a_client_error(engine: ProbedEngine) -> None:
    edits = tuple(Edit(f"blocks.{n}.hook_resid_post", "scale", 1e30) for n in (0, 0, 1, 1, 2, 2))
    each = request("r", tiny_models.text(5), interp=InterpRequest(edits=edits))
    other = request("good", tiny_models.text(9), num_new=3, logprobs=1)
    expected = engine.run(other)["good"].logprobs
    found = engine.run(each, other)
    assert found["r"].error_code == "invalid_request" and "smaller" in str(found["r"].error)
    assert found["good"].logprobs == expected
    assert engine.run(other)["good"].logprobs == expected  # in the blocks that it had


def test_an_interp_result_may_take_longer_than_a_step(
    engine: ProbedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is not given up for a step that hangs while a gradient is computed."""
    beats: list[float] = []
    patience: list[float] = []
    monkeypatch.setattr(engine.loop._pulse, "beat", lambda busy, s: beats.append(s), raising=False)
    advance = Reports.advance

    def observed(self: Reports, runner: Any) -> Any:
        patience.append(beats[-1])
        return advance(self, runner)

    monkeypatch.setattr(Reports, "advance", observed)
    monkeypatch.setattr(engine.loop._budget, "step_timeout_s", lambda *_: 10.0)
    engine.run(request("r", tiny_models.text(5), sites=(SITE,)))
    assert patience and set(patience) == {UNKNOWN_STEP_TIMEOUT_S}


def test_a_row_with_many_taps_is_computed_in_chunks(
    engine: ProbedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step takes for taps is bounded, and no value depends on it."""
    sites = tuple(site.name for site in engine.runner.sites)
    each = request("r", tiny_models.text(60), sites=sites, num_new=4)
    expected, steps = engine.run(each)["r"], engine.loop._num_steps
    monkeypatch.setattr(probe_module, "STEP_BYTES", 2**16)
    found = engine.run(each)["r"]
    assert engine.loop._num_steps - steps > 10
    for site, values in expected.captured.items():
        np.testing.assert_array_equal(found.captured[site], values, err_msg=site)


def test_a_large_interp_result_is_sent_in_pieces(
    engine: ProbedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runtime.interp.reports.PIECE_BYTES", 5000)
    sites = tuple(site.name for site in engine.runner.sites)
    other = request("other", tiny_models.text(5), num_new=8)
    found = engine.run(request("r", tiny_models.text(40), sites=sites), other)["r"]
    pieces = [each for each in found.deltas if each.captured is not None]
    assert len(pieces) > 10 and {len(each.captured) for each in pieces[:-1]} == {5000}
    assert [each.captured_at for each in pieces] == list(range(0, 5000 * len(pieces), 5000))
    assert {each.finish_reason for each in pieces[:-1]} == {None} and found.error is None
    assert set(found.captured) == set(sites)


def test_held_interp_results_count_towards_their_tenants_limit(
    engine: ProbedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, steps = tiny_models.text(30), "engine.runtime.interp.steps"
    each = request("first", prompt, sites=(SITE,), tenant="a")
    size = Probe(each.interp, engine.runner.sites, 30, 1).num_bytes
    monkeypatch.setattr(f"{steps}.MAX_HELD_BYTES", size + 10)
    engine.channel.answers.clear()
    with monkeypatch.context() as held:
        held.setattr(Reports, "advance", lambda *_: [])
        engine.submit(each)
        for _ in range(5):
            engine.loop.turn(0.0)
        assert len(engine.loop.scheduler.find(Probes).reports) == 1
        for name, tenant in (("second", "a"), ("third", "b")):
            engine.submit(request(name, prompt, sites=(SITE,), tenant=tenant))
        engine.loop.turn(0.0)
    while engine.loop.scheduler.has_work:
        engine.loop.turn(0.0)
    found = engine.answers()
    assert found["second"].error_code == "rate_limit_exceeded"
    assert found["first"].error is None and found["third"].error is None


def test_captures_that_do_not_fit_in_memory_are_refused(
    engine: ProbedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = request("r", tiny_models.text(30), sites=(SITE,))
    size = Probe(each.interp, engine.runner.sites, 30, 1).num_bytes
    for free, code in ((size, ""), (size - 1, "rate_limit_exceeded")):
        room = MemoryRoom(2**40, free)
        monkeypatch.setattr("engine.runtime.interp.steps.memory_room", lambda room=room: room)
        assert (engine.run(each)["r"].error_code or "") == code


def test_small_interp_results_do_not_wait_for_another_tenants_large_ones(
    engine: ProbedEngine,
) -> None:
    engine.channel.answers.clear()
    large = InterpRequest(lens=Lens((), 5), attention=AttentionPattern((0, 1, 2)))
    for n in range(4):
        engine.submit(request(f"{n}", tiny_models.text(90), interp=large, tenant="a"))
    engine.submit(request("small", tiny_models.text(5), sites=(SITE,), tenant="b"))
    engine.loop.turn(0.0)
    while engine.loop.scheduler.has_work:
        engine.loop.turn(0.0)
    deltas = [delta for _, message in engine.channel.answers for delta in message.deltas]
    ends = [delta.request_id for delta in deltas if delta.finish_reason]
    assert ends[0] == "small" and len(ends) == 5


def test_interp_results_are_not_computed_after_the_request_deadline(engine: ProbedEngine) -> None:
    each = request("late", tiny_models.text(5), sites=(SITE,), timeout_s=0.0)
    assert engine.run(each)["late"].error_code == "timeout"
    reports, probe = Reports(), SimpleNamespace(deadline=1.0)
    seq: Any = SimpleNamespace(tenant="", request_id="r", choice=0, token_ids=[])
    reports.hold(seq, probe, TokenDelta("r", 0, finish_reason="stop"))  # type: ignore[arg-type]
    (delta,) = reports.advance(engine.runner)
    assert delta.error_code == "timeout" and not reports
