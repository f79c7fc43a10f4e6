"""The benchmarks' arithmetic, and the load generator against a server whose answers are known."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from benchmarks import peers
from benchmarks.client import Failure, Sample, Target
from benchmarks.figures import Batch, percentile, prefix_figures, spread, summarize
from benchmarks.process import ServerError, ServerProcess, ServerSpec
from benchmarks.prompts import words
from benchmarks.report import SCENARIO_ROWS, Row, comparison_table, ratio, value_at
from benchmarks.run import free_port, judge
from benchmarks.scenarios import SCENARIOS, measure


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


def test_rates_follow_their_definitions() -> None:
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
    assert summarize([Batch(1.0, (merged,), {})], 5)["chunks_per_token"] == 0.6


def test_prefix_figures_compare_the_first_request_with_the_others() -> None:
    later = [sample(0.1, cached_tokens=1024), sample(0.2, cached_tokens=1000), sample(0.1)]
    figures = prefix_figures([Batch(1.0, (sample(1.0), *later), {})])
    assert figures["ttft_cold_ms"]["median"] == 1000.0
    assert figures["ttft_later_ms"]["median"] == 100.0
    assert figures["cold_over_later"]["median"] == 10.0
    broken = Batch(1.0, (Failure("x"), sample(0.1), sample(0.1)), {})
    assert prefix_figures([broken])["cold_over_later"] is None, "a later one passed for cold"


def test_ratios_above_one_favour_the_first_server() -> None:
    ours = [{"tps": {"median": 200.0}}, {"tps": {"median": 90.0}}, {"tps": {"median": 300.0}}]
    theirs = [{"tps": {"median": 100.0}}, {"tps": {"median": 90.0}}, {"tps": {"median": 100.0}}]
    assert ratio(ours, theirs, Row("", ("tps",), True)) == 2.0
    assert ratio(ours, theirs, Row("", ("tps",), False)) == 0.5
    assert ratio(ours, [{"tps": None}], Row("", ("tps",), True)) is None
    turns = {"turns": [{"ttft_ms": {"median": 9.0}}, {"ttft_ms": {"median": 5.0}}]}
    assert value_at(turns, ("turns", "last", "ttft_ms")) == 5.0
    assert value_at({"turns": []}, ("turns", "last", "ttft_ms")) is None


def test_a_weak_prefix_cache_fails_the_run() -> None:
    from rich.console import Console

    def verdict(times: float) -> bool:
        figures = {"failed": 0, "cold_over_later": {"median": times}}
        return all(judge({"engine": {"prefix": [figures]}}, Console(quiet=True)))

    assert verdict(5.0) and not verdict(4.9)


def test_prompts_depend_on_their_key_alone() -> None:
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
        tokens = [{"choices": [token]}] * body["max_tokens"]
        closing = {"choices": [{"finish_reason": "length", "delta": {}}]}
        return [*opening, *tokens, closing, {"choices": [], "usage": usage}]


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    port = free_port()
    fake = FakeServer(Target(f"http://127.0.0.1:{port}", "fake", {"ignore_eos": True}))
    app = web.Application()
    app.router.add_post("/v1/completions", fake.answer)
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
    assert figures["chunks_per_token"] == 1.0, "an opening or closing chunk was counted"
    assert server.most_in_flight == 3
    assert len({body["prompt"] for body in server.bodies}) == 13
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.bodies)


async def test_the_shared_prefix_is_met_cold_by_one_request(server: FakeServer) -> None:
    scenario = replace(SCENARIOS["prefix"], requests=5, output_tokens=2, concurrency=4)
    figures = await measure(scenario, server.target, seed="s", repeat=1, warmup=0)
    prompts = [body["prompt"].split() for body in server.bodies]
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 5
    assert figures["cached_tokens_later"] == 7 and figures["cold_over_later"] is not None
    assert server.most_in_flight <= 4


async def test_conversations_grow_by_what_the_server_said(server: FakeServer) -> None:
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


_TINY_SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply(b'{"data": [{"id": "tiny"}]}')
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(b'data: {"choices": [{"text": "x", "finish_reason": null}]}\\n\\n')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_a_server_is_started_until_it_answers_and_stopped_whole(tmp_path: Path) -> None:
    port = free_port()
    command = (sys.executable, "-c", _TINY_SERVER, str(port))
    process = ServerProcess(ServerSpec("tiny", command, port), tmp_path / "log")
    running = await process.start(timeout=30)
    tree = psutil.Process(running.pid).children()
    process.stop()
    assert running.target.model == "tiny"
    assert 0 < running.ready_s <= running.first_completion_s
    gone, alive = psutil.wait_procs(tree, timeout=5)
    assert len(gone) == 1 and not alive


async def test_a_server_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "raise SystemExit('broken')")
    process = ServerProcess(ServerSpec("dead", command, free_port()), tmp_path / "log")
    with pytest.raises(ServerError, match="log"):
        await process.start(timeout=30)
    assert "broken" in (tmp_path / "log").read_text()


def test_a_missing_peer_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = peers.Setup(Path("model.gguf"), tmp_path, threads=2, port=1)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(peers.Unavailable, match="pip install"):
        peers.transformers_serve(setup)
    own = tmp_path / "transformers" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    (tmp_path / "checkpoints" / "model-bf16-no-eos").mkdir(parents=True)
    spec = peers.transformers_serve(setup)
    assert spec.command[0] == str(own.with_name("transformers"))
    assert spec.model in spec.command and "ignore_eos" not in spec.extra_body


def test_every_scenario_has_its_rows() -> None:
    assert set(SCENARIO_ROWS) == {"cold", *SCENARIOS}
    cold = {"ready_s": 1.0, "first_completion_s": 2.0}
    table = comparison_table({"engine": {"cold": [cold]}, "peer": {"cold": [cold]}})
    assert [column.header for column in table.columns][2:] == ["engine", "peer", "engine vs peer"]
    assert table.row_count == 2
