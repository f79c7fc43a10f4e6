"""The benchmarks' arithmetic, and the load generator against a server whose answers are known."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks.client import ACCEPTED_DRAFTS, Failure, Sample, Target, new_session
from benchmarks.figures import Batch, percentile, prefix_figures, spread, summarize
from benchmarks.kernels import scaling
from benchmarks.prompts import words
from benchmarks.report import (
    HEADLINE,
    MORE_ROWS,
    Bar,
    Figures,
    Results,
    Row,
    bars_table,
    best_peer,
    complaints,
    remarks,
    value_at,
    whole_run,
)
from benchmarks.run import WAVES, chosen_scenarios, free_port
from benchmarks.scenarios import SCENARIOS, Measurement, measure
from benchmarks.sweeps import SWEEPS
from engine.native.execution import timing


def sample(ttft: float, gaps: tuple[float, ...] = (), **changes: Any) -> Sample:
    made = Sample(
        ttft=ttft,
        gaps=gaps,
        e2e=ttft + sum(gaps),
        prompt_tokens=100,
        output_tokens=len(gaps) + 1,
        cached_tokens=None,
        chunks=len(gaps) + 1,
        counted_by_usage=True,
        text="",
    )
    return replace(made, **changes)


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([3.0, 1.0], 50) == 1.0
    assert percentile([], 50) is None
    assert spread([None, 3, 1, 2]) == {"median": 2, "min": 1, "max": 3}
    assert spread([None]) is None


def test_benchmark_rates_follow_their_definitions() -> None:
    fast, slow = sample(0.1, (0.02,) * 10), sample(0.4, (0.04,) * 10)
    batch = Batch(2.0, (fast, slow, Failure("500")), {"client": 0.1})
    figures = summarize([batch], output_tokens=12)
    assert (figures["ok"], figures["failed"], figures["first_error"]) == (2, 1, "500")
    assert figures["output_tps"]["median"] == 11.0  # 22 tokens in 2 s
    assert figures["total_tps"]["median"] == 111.0
    assert figures["decode_tps"]["median"] == 37.5  # of 50 and 25
    assert figures["prefill_tps"]["median"] == 625.0  # of 1,000 and 250
    assert figures["ttft_ms"] == {"p50": 100.0, "p99": 400.0}
    assert figures["itl_ms"] == {"p50": 20.0, "p99": 40.0}
    assert figures["short_outputs"] == 2


def test_time_per_token_counts_tokens_and_not_chunks() -> None:
    merged = sample(0.1, (0.1, 0.1), output_tokens=5)  # three chunks, five tokens
    assert merged.tpot == pytest.approx(0.05)
    assert sample(0.1).tpot is None
    assert summarize([Batch(1.0, (merged,), {})], 5)["chunks_per_step"] == 0.6


def test_prefix_figures_compare_cold_and_cached_requests() -> None:
    later = [sample(0.1, cached_tokens=1024), sample(0.2, cached_tokens=1000), sample(0.1)]
    figures = prefix_figures([Batch(1.0, (sample(1.0), *later), {})])
    assert figures["ttft_cold_ms"]["median"] == 1000.0
    assert figures["ttft_later_ms"]["median"] == 100.0
    assert figures["cold_over_later"]["median"] == 10.0
    broken = Batch(1.0, (Failure("x"), sample(0.1), sample(0.1)), {})
    assert prefix_figures([broken])["cold_over_later"] is None, "a later one passed for cold"


def load(rate: float, **changes: Any) -> Figures:
    """Figures of a scenario that went well."""
    rates = {"median": rate, "min": rate - 1, "max": rate + 1}
    good: Figures = {"ok": 4, "failed": 0, "first_error": "500", "chunks_per_step": 1.0}
    return {**good, "output_tps": rates, "itl_ms": {"p99": 1e3 / rate}, **changes}


def cells(results: Results) -> dict[str, list[str]]:
    """The table's rows by their first cell."""
    columns = [list(column.cells) for column in bars_table(results).columns]
    return {str(label): [str(cell) for cell in row] for label, *row in zip(*columns, strict=True)}


def test_a_benchmark_figure_is_found_by_its_path() -> None:
    turns = {"turns": [{"ttft_ms": {"median": 9.0}}, {"ttft_ms": {"median": 5.0}}]}
    assert value_at(turns, ("turns", "last", "ttft_ms")) == 5.0
    assert value_at({"turns": []}, ("turns", "last", "ttft_ms")) is None
    assert value_at({"itl_ms": {"p50": 1.0, "p99": 7.0}}, ("itl_ms", "p99")) == 7.0


def test_ratios_compare_with_the_best_peer_without_failures() -> None:
    results = {
        "engine": {"conc 8": load(600.0)},
        "slow": {"conc 8": load(100.0)},
        "quick": {"conc 8": load(200.0)},
        "broken": {"conc 8": load(5000.0, failed=1)},
    }
    rate = Row("", "conc 8", ("output_tps",), True)
    assert best_peer(results, rate) == 200.0
    assert best_peer(results, replace(rate, path=("itl_ms", "p99"), higher_is_better=False)) == 5.0
    table = cells(results)
    own = "600.0 (599.0-601.0)"
    assert table["8 concurrent, output tok/s"][0] == own
    assert table["8 concurrent, output tok/s"][3:] == ["failed", "3.00x", ">= 3x best", "met"]
    assert table["p99 ITL at 8 concurrent, ms"][4:] == ["0.33x", "<= 0.6x best", "met"]


def test_performance_bars_respect_the_direction_of_their_figure() -> None:
    rate = Row("", "", (), True, bar=Bar(2.5))
    assert [rate.meets(own, 100.0) for own in (250.0, 249.0)] == [True, False]
    seconds = Row("", "", (), False, bar=Bar(0.5))
    assert [seconds.meets(own, 4.0) for own in (2.0, 2.1)] == [True, False]
    memory = Row("", "", (), False, bar=Bar(600, times_best=False))
    assert [memory.meets(own, None) for own in (600.0, 601.0)] == [True, False]
    assert rate.meets(250.0, None) is None, "judged without a peer"
    assert rate.meets(None, 100.0) is None


def test_the_fast_numerics_engine_has_its_own_row_and_is_no_peer() -> None:
    results = {
        "engine": {"conc 32": load(500.0)},
        "engine fast": {"conc 32": load(650.0)},
        "peer": {"conc 32": load(200.0)},
    }
    table = cells(results)
    fast = table["32 concurrent, --numerics fast"]
    assert fast[0].startswith("650.0") and fast[2:] == ["3.25x", ">= 3.5x best", "missed"]
    assert table["32 concurrent, output tok/s"][2:] == ["2.50x", ">= 2.5x best", "met"]
    del results["engine fast"], results["peer"]
    alone = cells(results)
    assert "32 concurrent, --numerics fast" not in alone
    assert alone["32 concurrent, output tok/s"][1:] == ["-", ">= 2.5x best", ""]


def test_machines_with_amx_have_other_performance_bars() -> None:
    results: Results = {"engine": {"conc 32": load(20.0)}, "peer": {"conc 32": load(10.0)}}
    verdicts = [bars_table(results, has_amx=has).columns[-1]._cells for has in (False, True)]
    assert verdicts == [["missed"], ["met"]]


def test_every_benchmark_scenario_has_its_rows() -> None:
    barred = {row.scenario.split()[0] for row in HEADLINE}
    assert barred | set(MORE_ROWS) == {*SCENARIOS, "cold", "whole"}
    results: Results = {"engine": {"conc 2": load(10.0), "conc 8": load(20.0)}}
    assert "conc 2: output tok/s" in cells(results) and "conc 8: output tok/s" not in cells(results)


def test_failures_and_tokens_sent_in_lumps_void_a_run() -> None:
    good = load(10.0)
    lumped = whole_run([good, load(10.0, chunks_per_step=0.94)], 500.0)
    assert lumped == {"peak_rss_mb": 500.0, "chunks_per_step": 0.94}
    assert complaints({"engine": {"single": good, "whole run": whole_run([good], 500.0)}}) == []
    assert "0.94" in complaints({"engine": {"whole run": lumped}})[0]
    assert "500" in complaints({"engine": {"single": load(1.0, failed=2)}})[0]
    assert complaints({"engine": {}, "peer": {"whole run": lumped}}) == []


def test_a_weak_prefix_cache_voids_a_run() -> None:
    def found(times: float) -> list[str]:
        return complaints({"engine": {"reuse": load(1.0, cold_over_later={"median": times})}})

    assert not found(5.0) and found(4.9)


def test_disturbed_and_short_runs_are_marked() -> None:
    quiet = load(1.0, cores={"others": {"median": 0.1, "max": 0.2}}, short_outputs=0)
    busy = load(1.0, cores={"others": {"median": 0.1, "max": 0.5}}, short_outputs=3)
    assert remarks({"engine": {"single": quiet}}) == []
    assert remarks({"peer": {"single": busy}}) == [
        "single on peer: other work used up to 0.5 cores",
        "single on peer: 3 answers were short",
    ]


@pytest.mark.parametrize(("rounds", "at_eight"), [(1, 64), (2, 32), (3, 32)])
def test_concurrent_requests_come_in_waves_and_suffice_for_a_p99(
    rounds: int, at_eight: int
) -> None:
    single, eight, many = chosen_scenarios(["single", "conc"], [8, 32], rounds)
    assert (single.requests, eight.requests, many.requests) == (4, at_eight, WAVES * 32)
    assert eight.num_requests * rounds >= 64


def test_prompts_depend_only_on_their_key() -> None:
    assert words(50, "a", 1) == words(50, "a", 1)
    assert len(words(50, "a", 1).split()) == 50
    assert len({words(8, "a", number) for number in range(200)}) == 200


@dataclass
class FakeServer:
    """Answers every token that it is asked for, and remembers what it was asked."""

    target: Target
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    fail: bool = False
    drafts_per_answer: int = 0

    async def metrics(self, _request: web.Request) -> web.Response:
        total = self.drafts_per_answer * len(self.bodies)
        return web.Response(text=f"{ACCEPTED_DRAFTS}{{model_name='fake'}} {float(total)}\n")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.fail:
            return web.json_response({"error": {"message": "no"}}, status=503)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self._events(body):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        self.in_flight -= 1
        return response

    def _events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        said = "".join(message["content"] for message in body.get("messages", ()))
        prompt = body.get("prompt", said)
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": body["max_tokens"]}
        usage["prompt_tokens_details"] = {"cached_tokens": 7}  # type: ignore[assignment]
        token = {"finish_reason": None, "delta": {"content": "x "}}
        if "prompt" in body:
            token = {"finish_reason": None, "text": ""}  # half a character is still a token
        opening = [{"choices": [{"finish_reason": None, "delta": {"role": "assistant"}}]}]
        tokens = [{"choices": [token]}] * (body["max_tokens"] - self.drafts_per_answer)
        closing = {"choices": [{"finish_reason": "length", "delta": {}}]}
        return [*opening, *tokens, closing, {"choices": [], "usage": usage}]


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    port = free_port()
    fake = FakeServer(Target(f"http://127.0.0.1:{port}", "fake", {"ignore_eos": True}))
    app = web.Application()
    app.router.add_post("/v1/completions", fake.answer)
    app.router.add_get("/metrics", fake.metrics)
    app.router.add_post("/v1/chat/completions", fake.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield fake
    await runner.cleanup()


async def test_concurrent_load_is_bounded_and_counted(server: FakeServer) -> None:
    scenario = replace(SCENARIOS["conc"], concurrency=3, output_tokens=5)
    figures = await measure(scenario, server.target, seed="s", repeat=2, warmup=1)
    assert (figures["ok"], figures["failed"], figures["short_outputs"]) == (12, 0, 0)
    assert figures["output_tokens_mean"] == 5 and figures["prompt_tokens_mean"] == 128
    assert figures["chunks_per_step"] == 1.0, "an opening or closing chunk was counted"
    assert server.most_in_flight == 3
    assert len({body["prompt"] for body in server.bodies}) == 13
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.bodies)


async def test_accepted_drafts_do_not_count_as_lumped_tokens(server: FakeServer) -> None:
    server.drafts_per_answer = 2
    scenario = replace(SCENARIOS["conc"], concurrency=3, output_tokens=5)
    figures = await measure(scenario, server.target, seed="s", repeat=2, warmup=1)
    assert figures["chunks_per_step"] == 1.0


async def test_latencies_are_pooled_over_batches_and_rates_are_medians(server: FakeServer) -> None:
    scenario = replace(SCENARIOS["conc"], requests=4, output_tokens=3)
    measurement = Measurement(scenario, server.target)
    async with new_session(10) as session:
        batches = [await measurement.add_batch(session, f"round-{number}") for number in range(3)]
    figures = measurement.figures()
    walls = sorted(batch.wall for batch in batches)
    gaps = [gap for batch in batches for each in batch.samples for gap in each.gaps]
    assert (figures["ok"], figures["repeat"]) == (12, 3)
    assert figures["wall_s"]["median"] == pytest.approx(walls[1], abs=1e-3)
    assert figures["itl_ms"]["p99"] == pytest.approx(1e3 * max(gaps), abs=0.01)
    assert len({body["prompt"] for body in server.bodies}) == 12, "a round met the prefix cache"


async def test_a_shared_prefix_is_requested_by_all_at_once(server: FakeServer) -> None:
    scenario = replace(SCENARIOS["prefix"], requests=8, output_tokens=20, concurrency=4)
    await measure(scenario, server.target, seed="s", repeat=1, warmup=0)
    prompts = [body["prompt"].split() for body in server.bodies]
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert [len(prompt) for prompt in prompts] == [1056] * 8
    assert server.most_in_flight == 4


async def test_one_request_meets_a_reused_prefix_cold(server: FakeServer) -> None:
    scenario = replace(SCENARIOS["reuse"], requests=5, output_tokens=2, concurrency=4)
    figures = await measure(scenario, server.target, seed="s", repeat=1, warmup=0)
    prompts = [body["prompt"].split() for body in server.bodies]
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 5
    assert figures["cached_tokens_later"] == 7 and figures["cold_over_later"] is not None
    assert server.most_in_flight <= 4


async def test_benchmark_conversations_include_the_servers_answers(server: FakeServer) -> None:
    scenario = replace(SCENARIOS["chat"], requests=2, turns=3, output_tokens=2, prompt_words=4)
    figures = await measure(scenario, server.target, seed="s", repeat=1, warmup=0)
    assert [turn["turn"] for turn in figures["turns"]] == [1, 2, 3]
    lengths = [len(body["messages"]) for body in server.bodies]
    assert lengths == [1, 3, 5, 1, 3, 5]
    assert server.bodies[2]["messages"][1] == {"role": "assistant", "content": "x x "}


async def test_refused_requests_are_failures_and_not_samples(server: FakeServer) -> None:
    server.fail = True
    figures = await measure(SCENARIOS["single"], server.target, seed="s", repeat=1, warmup=0)
    assert (figures["ok"], figures["failed"]) == (0, 4)
    assert figures["first_error"].startswith("503")
    assert figures["output_tps"]["median"] == 0.0


def test_sweep_loads_fit_the_servers_limits() -> None:
    for sweep in SWEEPS.values():
        for _, scenario in sweep.loads:
            assert scenario.concurrency <= sweep.sequences
            assert scenario.prompt_words + scenario.output_tokens <= sweep.context


@pytest.mark.seconds
def test_plots_are_drawn_from_stored_points(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.machine import machine
    from benchmarks.plots import draw

    points = [{"x": 1, "y": 10.0}, {"x": 2, "y": 15.0}]
    servers = {"engine": {"note": "", "points": points}, "peer": {"note": "n", "points": []}}
    for name in SWEEPS:
        document = {"sweep": name, "machine": machine(), "model": "m", "servers": servers}
        picture = draw(json.loads(json.dumps(document)), tmp_path)
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_scaling_measures_a_random_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(timing, "MIN_FORWARDS", 2)
    found = tmp_path / "rates.json"
    asked = f"--shape tiny --threads 1 2 --rounds 2 --folder {tmp_path} --output {found}"
    scaling.main(asked.split())
    rounds = json.loads(found.read_text())["ours"]
    assert rounds.keys() == {"1", "2"}
    for each in rounds.values():
        assert len(each) == 2
        assert all(rates.keys() == {"prefill", "1", "8", "32"} for rates in each)
    *_, one, two, stolen = capsys.readouterr().out.splitlines()
    best = [max(rates[name] for rates in rounds["1"]) for name in ("prefill", "1", "8", "32")]
    assert one.split() == ["1", *(f"{rate:.1f}" for rate in best)]
    assert two.split()[0] == "2"
    assert stolen.startswith("stolen by other machines")
