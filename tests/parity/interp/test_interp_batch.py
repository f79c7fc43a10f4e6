"""Interpretability requests in a shared batch: others keep their bits, captures do not depend on
the schedule, and edited prefixes stay among themselves.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.adapters.reading import open_adapter
from engine.architectures.sites import site_name
from engine.core.interfaces.interp import (
    AttentionPattern,
    Attribution,
    Capture,
    Edit,
    InterpRequest,
    Lens,
    Span,
)
from engine.core.interfaces.request import (
    Abort,
    AdapterRef,
    GenerateRequest,
    Resumed,
    TokenDelta,
)
from engine.runtime.interp.steps import Probes
from tests.parity import tiny_models
from tests.parity.hooked import Hooked
from tests.support.files.lora_files import peft_folder
from tests.support.toy_engine.probed_engine import Answer, ProbedEngine, request

WIDTH = tiny_models.COMMON["hidden_size"]
BLOCK_BYTES = 16 * 3 * 2 * 2 * 32 * 4  # tokens, layers, k and v, heads, padded size, float32


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_models.save("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(saved: Any) -> Iterator[ProbedEngine]:
    """An engine that shares no prefixes."""
    engine = ProbedEngine(saved[1], "native", cache_enabled=False)
    yield engine
    engine.close()


def vector(seed: int, width: int = WIDTH) -> bytes:
    return np.random.default_rng(seed).normal(size=width).astype(np.float32).tobytes()


def steered(layer: int = 1, scale: float = 1.5, **span: Any) -> Edit:
    return Edit(site_name(layer, "resid_post"), "add", scale, (vector(layer),), Span(**span))


def test_requests_beside_an_interp_request_keep_their_bits(saved: Any) -> None:
    engine = ProbedEngine(saved[1], "native", max_slots=32, max_seq_len=64)
    others = [
        request(f"{n}", tiny_models.text(5 + n % 17, n), num_new=8, logprobs=3) for n in range(31)
    ]
    probed = request(
        "probed",
        tiny_models.text(20, 99),
        sites=tuple(site.name for site in engine.runner.sites),
        edits=(steered(), Edit("blocks.0.mlp.hook_pre", "scale", 0.5)),
        num_new=8,
    )
    expected = engine.run(*others)
    engine.loop.scheduler.kv.flush()
    found = engine.run(*others[:15], probed, *others[15:])
    engine.close()
    assert found["probed"].error is None
    for name, answer in expected.items():
        assert found[name].tokens == answer.tokens
        assert found[name].logprobs == answer.logprobs


def test_edited_prefixes_are_cached_apart_from_plain_ones(saved: Any) -> None:
    engine = ProbedEngine(saved[1], "native")
    prompt = tiny_models.text(60)
    plain = request("plain", prompt, num_new=4, logprobs=3)
    edited = request("edited", prompt, edits=(steered(),), num_new=4, logprobs=3)
    first = engine.run(plain)["plain"], engine.run(edited)["edited"]
    again = engine.run(plain)["plain"], engine.run(edited)["edited"]
    assert first[0].logprobs != first[1].logprobs
    for before, after in zip(first, again, strict=True):
        assert before.logprobs == after.logprobs
        assert after.deltas[0].num_cached >= 48  # each found its own prefix
    stronger = engine.run(request("other", prompt, edits=(steered(scale=2.0),), logprobs=3))
    assert stronger["other"].deltas[0].num_cached == 0
    # Where the prompt ends decides which tokens are edited, so such edits share only equal prompts.
    late = (steered(phase="decode"),)
    whole = engine.run(request("late", prompt, edits=late, num_new=8))["late"]
    longer = request("longer", prompt + whole.tokens, edits=late, logprobs=3)
    cached, fresh = engine.run(longer)["longer"], ProbedEngine(saved[1], "native")
    assert cached.logprobs == fresh.run(longer)["longer"].logprobs
    engine.close()
    fresh.close()


def random_request(rng: Random, name: str, sites: list[Any]) -> GenerateRequest:
    prompt = tiny_models.text(48, rng.randrange(2))[: rng.randrange(1, 49)]
    edits, captures = [], []
    for _ in range(rng.randrange(3)):
        site = rng.choice([each for each in sites if each.can_edit])
        kind = rng.choice(["add", "scale", "set"])
        data = () if kind == "scale" else (vector(rng.randrange(3), site.width),)
        edits.append(Edit(site.name, kind, rng.choice([0.5, 1.5]), data, random_span(rng)))
    for site in rng.sample(sites, rng.randrange(4)):
        captures.append(Capture(site.name, random_span(rng)))
    interp = InterpRequest(tuple(captures), tuple(edits)) if captures or edits else None
    return request(name, prompt, interp=interp, num_new=rng.randrange(1, 9), logprobs=1)


def random_span(rng: Random) -> Span:
    places = rng.choice([None, None, (-1,), (0, 2, 5), (-3, 40)])
    return Span(places, rng.choice(["both", "both", "prompt", "decode"]))


def assert_same(found: Answer, expected: Answer, name: str) -> None:
    assert found.tokens == expected.tokens, name
    assert found.logprobs == expected.logprobs, name
    assert found.positions == expected.positions, name
    for site, values in expected.captured.items():
        np.testing.assert_array_equal(found.captured[site], values, err_msg=f"{name} {site}")


@pytest.mark.parametrize("seed", range(6))
def test_captures_do_not_depend_on_the_schedule(saved: Any, alone: ProbedEngine, seed: int) -> None:
    """Chunked, preempted, cached and aborted: the pool holds about two of the sequences."""
    rng = Random(seed)
    engine = ProbedEngine(
        saved[1],
        "native",
        max_slots=4,
        max_seq_len=64,
        max_batch_tokens=rng.choice([24, 64]),
        pool_bytes=9 * BLOCK_BYTES,
    )
    sites = list(engine.runner.sites)
    requests = [random_request(rng, f"{n}", sites) for n in range(14)]
    aborted = {each.request_id for each in rng.sample(requests, 3)}
    for each in requests:
        engine.submit(each)
        for _ in range(rng.randrange(3)):
            engine.loop.turn(0.0)
            engine.loop.scheduler.check()
        if each.request_id in aborted:
            engine.submit(Abort(each.request_id))
    while engine.loop.scheduler.has_work:
        engine.loop.turn(0.0)
        engine.loop.scheduler.check()
    answers = engine.answers()
    for each in requests:
        if each.request_id not in aborted:
            expected = alone.run(each)[each.request_id]
            assert_same(answers[each.request_id], expected, each.request_id)
    assert not engine.loop.scheduler.find(Probes).reports
    engine.loop.scheduler.kv.flush()
    assert engine.loop.scheduler.kv.pool.num_free == engine.loop.scheduler.kv.pool.num_usable
    engine.close()


def everything(engine: ProbedEngine, layer: int = 2) -> InterpRequest:
    """All sites at all positions, and all that is derived from them."""
    sites = tuple(Capture(site.name) for site in engine.runner.sites)
    return InterpRequest(sites, lens=Lens((), 4), attention=AttentionPattern((layer,)))


def preempt_all(engine: ProbedEngine) -> None:
    for seq in list(engine.loop.scheduler.table.running):
        engine.loop.scheduler._preempt(seq)


def step_until(engine: ProbedEngine, name: str, num_tokens: int) -> None:
    while len(engine.answers().get(name, Answer([TokenDelta(name, 0)])).tokens) < num_tokens:
        engine.loop.turn(0.0)


def finished(engine: ProbedEngine, name: str) -> Answer:
    while engine.loop.scheduler.has_work:
        engine.loop.turn(0.0)
    return engine.answers()[name]


@pytest.mark.parametrize("has_cache", [False, True])
def test_captures_of_a_preempted_request_equal_those_of_an_undisturbed_one(
    saved: Any, alone: ProbedEngine, has_cache: bool
) -> None:
    each = request("r", tiny_models.text(20), interp=everything(alone), num_new=9, logprobs=1)
    expected = alone.run(each)["r"]
    engine = ProbedEngine(saved[1], "native", max_batch_tokens=16, cache_enabled=has_cache)
    engine.submit(each)
    for num_tokens in (1, 4, 5):
        step_until(engine, "r", num_tokens)
        preempt_all(engine)
    found = finished(engine, "r")
    engine.close()
    assert engine.loop.scheduler.num_preemptions == 3
    assert_same(found, expected, "r")
    assert found.lens == expected.lens


@pytest.mark.parametrize("num_known", [1, 4, 8])
@pytest.mark.parametrize("has_cache", [False, True])
def test_captures_of_a_revived_request_equal_those_of_an_undisturbed_one(
    saved: Any, alone: ProbedEngine, has_cache: bool, num_known: int
) -> None:
    """The tokens that an engine generated before it died are computed by the next one."""
    each = request("r", tiny_models.text(20), interp=everything(alone), num_new=9, logprobs=1)
    expected = alone.run(each)["r"]
    engine = ProbedEngine(saved[1], "native", max_batch_tokens=16, cache_enabled=has_cache)
    known = tuple(expected.tokens[:num_known])
    if has_cache:  # another request has left all of its tokens in the cache
        engine.run(request("other", [*each.prompt, *expected.tokens], num_new=1))
    found = engine.run(replace(each, resumed=(Resumed(0, known),)))["r"]
    engine.close()
    assert found.tokens == expected.tokens[num_known:]
    assert found.positions == expected.positions
    for site, values in expected.captured.items():
        np.testing.assert_array_equal(found.captured[site], values, err_msg=site)
    assert found.lens == expected.lens


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_captures_of_other_frameworks_survive_preemption_and_revival(
    saved: Any, framework: str
) -> None:
    """Their steps have other shapes then, so values agree up to rounding."""
    calm = ProbedEngine(saved[1], framework, cache_enabled=False)
    each = request("r", tiny_models.text(20), interp=everything(calm), num_new=9)
    expected = calm.run(each)["r"]
    revived = calm.run(replace(each, resumed=(Resumed(0, tuple(expected.tokens[:5])),)))["r"]
    calm.close()
    engine = ProbedEngine(saved[1], framework, max_batch_tokens=16)
    engine.submit(each)
    for num_tokens in (1, 4, 7):
        step_until(engine, "r", num_tokens)
        preempt_all(engine)
    preempted = finished(engine, "r")
    engine.close()
    assert engine.loop.scheduler.num_preemptions >= 2  # tokens may come in pairs
    assert expected.error is None and preempted.tokens == expected.tokens
    assert revived.tokens == expected.tokens[5:]
    for found in (preempted, revived):
        assert found.positions == expected.positions
        for site, values in expected.captured.items():
            assert np.abs(values).max(axis=tuple(range(1, values.ndim))).all(), site
            np.testing.assert_allclose(found.captured[site], values, atol=2e-4, err_msg=site)


def test_lens_attention_and_attribution_agree_with_the_model(saved: Any) -> None:
    theirs, path = saved
    tokens = tiny_models.text(12)
    hooked = Hooked(theirs)
    logits = hooked.run(tokens)
    engine = ProbedEngine(path, "native")
    interp = InterpRequest(
        lens=Lens((), 4), attention=AttentionPattern((0, 2)), attribution=Attribution(target=7)
    )
    answer = engine.run(request("r", tokens, interp=interp))["r"]
    engine.close()
    assert answer.error is None
    with torch.no_grad():
        theirs.set_attn_implementation("eager")
        weights = theirs(torch.tensor([tokens]), output_attentions=True).attentions
    for layer in (0, 2):
        ours = answer.captured[f"blocks.{layer}.attn.hook_pattern"]  # (P, N, K)
        expected = weights[layer][0].transpose(0, 1).numpy()
        np.testing.assert_allclose(ours, expected, atol=1e-5)
    head = theirs.lm_head
    for row in answer.lens:
        stream = hooked.values[site_name(row["layer"], "resid_post")][row["position"]]
        expected_row = head(theirs.model.norm(stream)).log_softmax(-1)
        top = expected_row.topk(4)
        assert [token for token, _ in row["top"]] == top.indices.tolist()
        np.testing.assert_allclose([p for _, p in row["top"]], top.values.detach(), atol=1e-4)
    assert len(answer.lens) == 3 * len(tokens)
    told = answer.facts["attribution"]
    assert told["total"] == pytest.approx(float(logits[-1, 7]), abs=1e-4)


def test_lens_and_attribution_of_an_adapter_use_its_logits(saved: Any, tmp_path: Path) -> None:
    modules = {f"model.layers.{n}.self_attn.o_proj": (WIDTH, WIDTH) for n in range(3)}
    folder = peft_folder(tmp_path / "adapter", modules, std=0.3)
    engine = ProbedEngine(saved[1], "native")
    adapter = open_adapter(folder, engine.runner.config)
    ref = AdapterRef(adapter.key, str(folder), adapter.changes_head)
    tokens = tiny_models.text(12)
    plain = engine.run(request("plain", tokens, logprobs=2))["plain"].logprobs[0]
    totals = {}
    for target in (5, 7):
        interp = InterpRequest(
            lens=Lens((2,), tiny_models.VOCAB, Span((-1,))), attribution=Attribution(target)
        )
        each = request("adapted", tokens, interp=interp, adapter=ref, logprobs=2)
        answer = engine.run_when_loaded(each)
        assert answer.error is None, answer.error
        totals[target] = answer.facts["attribution"]["total"]
    engine.close()
    lens = dict(answer.lens[0]["top"])
    found = answer.logprobs[0]
    for token, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
        assert lens[token] == pytest.approx(logprob, abs=1e-4)
    assert totals[5] - totals[7] == pytest.approx(lens[5] - lens[7], abs=1e-4)
    assert abs(plain.top_logprobs[0] - found.top_logprobs[0]) > 0.01, "the adapter does nothing"


@pytest.mark.parametrize(
    ("interp", "code"),
    [
        (InterpRequest((Capture("blocks.9.hook_resid_post"),)), "invalid_request"),
        (InterpRequest(edits=(Edit("hook_embed", "add", 1.0, (bytes(8),)),)), "invalid_request"),
        (
            InterpRequest(
                edits=(Edit("hook_embed", "add", 1.0, (np.full(WIDTH, np.nan, "f4").tobytes(),)),)
            ),
            "invalid_request",
        ),
        (InterpRequest(edits=(Edit("blocks.0.attn.hook_rot_q", "scale"),)), "invalid_request"),
        (InterpRequest((Capture("hook_embed"),), max_bytes=64), "invalid_request"),
        (InterpRequest(attention=AttentionPattern((0,), (99,))), "invalid_request"),
        (InterpRequest(edits=(steered(scale=3e38),)), "invalid_request"),
    ],
)
def test_an_invalid_interp_request_fails_without_affecting_others(
    alone: ProbedEngine, interp: InterpRequest, code: str
) -> None:
    good = request("good", tiny_models.text(6), num_new=4, logprobs=1)
    expected = alone.run(good)["good"]
    found = alone.run(good, request("bad", tiny_models.text(6), interp=interp))
    assert found["bad"].error_code == code, found["bad"].error
    assert found["good"].logprobs == expected.logprobs
