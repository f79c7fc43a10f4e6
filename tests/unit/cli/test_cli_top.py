"""`engine top`: what it makes of a server with a router, of one without, and of nobody."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from engine.cli.commands import app
from engine.cli.ops.top import as_view
from engine.cli.ops.top_data import Look, ScrapedMetrics, frame_of, parse_metrics, quantile
from tests.support.fakes.fake_backend import MODEL
from tests.support.servers.live_server import chat, live_server


def backend(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "native",
        "weight": 1.0,
        "tags": [],
        "state": "ready",
        "detail": "",
        "in_flight": 2,
        "max_concurrent": 64,
        "requests": 10,
        "failures": 0,
        "restarts": 0,
        "tokens_per_s": 50.0,
        "ttft_p50_s": 0.05,
        "prefix_hit_rate": 0.5,
    } | fields


def routed(at: float, *backends: dict[str, Any]) -> Look:
    decision = {
        "request_id": "chatcmpl-1",
        "model": "smol",
        "chosen": "fast",
        "policy": "prefix",
        "why": "it has seen 96 [red]tokens",
        "candidates": [],
        "attempts": 2,
        "at": 1.0,
    }
    model = {"id": "smol", "policy": "prefix", "backends": list(backends)}
    routes = {"models": [model], "decisions": [decision]}
    return Look(at, {"status": "healthy"}, ScrapedMetrics(), ({"id": "smol"},), routes)


def shown(frame: Any) -> str:
    console = Console(width=90, record=True)
    with console.capture() as captured:
        console.print(as_view(frame, "q leaves"))
    return captured.get()


def test_top_shows_backends_with_rates_between_two_samples():
    before = routed(10.0, backend("fast"), backend("slow"))
    now = routed(
        12.0,
        backend("fast", requests=16),
        backend("slow", state="down", detail="it died\x1b[2J", restarts=3, failures=7),
    )
    frame = frame_of("http://x", before, now)
    fast, slow = frame.backends
    assert (fast.requests_per_s, slow.requests_per_s) == (3.0, 0.0)
    assert (frame.in_flight, frame.tokens_per_s) == (4, 100.0)
    text = shown(frame)
    assert "smol on slow: it died [2J" in text  # no control characters
    assert "prefix: it has seen 96 [red]tokens" in text  # no markup
    assert "fast, attempt 2" in text
    # A server that was started anew counts from zero.
    assert (
        frame_of("http://x", now, routed(13.0, backend("fast", requests=1)))
        .backends[0]
        .requests_per_s
        == 0
    )


def test_top_draws_the_batch_as_bars_that_fit_the_terminal():
    row = {"request_id": "chatcmpl-abc\x1b[2J123", "num_prompt": 60, "max_tokens": 40}
    running = [
        row | {"num_computed": 60, "num_cached": 30, "num_generated": 20, "seconds": 1.5},
        row | {"num_computed": 30, "num_cached": 30, "num_generated": 0, "seconds": 0.5},
    ]
    engine = {"name": "smol", "running": running * 7, "blocked_by": "blocks", "waiting": []}
    engine["waiting"] = [{"seconds": 3.25}]
    before = routed(10.0, backend("fast"))
    now = replace(routed(12.0, backend("fast")), engines=(engine,))
    text = shown(frame_of("http://x", before, now))
    lines = [line for line in text.splitlines() if "━" in line]
    # 36 cells stand for 100 tokens: prompt and 20 generated tokens, or the prompt alone.
    assert [line.count("━") for line in lines[:2]] == [29, 22]
    assert "20/40" in lines[0] and "30/60" in lines[1]
    assert len(lines) == 12 and "and 2 more sequences" in text
    assert "1 wait for blocks, up to 3.2 s" in text
    assert "\x1b" not in lines[0]
    assert max(map(len, text.splitlines())) <= 90


def test_top_shows_a_training_job():
    before = routed(10.0, backend("fast"))
    names = {"step": 12, "steps": 240, "loss": 0.5, "tokens_per_second": 90, "held": 0}
    values = {f"engine_finetuning_{name}": float(value) for name, value in names.items()}
    now = replace(before, at=12.0, metrics=ScrapedMetrics(values))
    text = shown(frame_of("http://x", before, now))
    assert "fine-tuning: step 12 of 240, loss 0.500, 90 tok/s" in text
    now = replace(now, metrics=ScrapedMetrics(values | {"engine_finetuning_held": 1.0}))
    assert "held while requests are open" in shown(frame_of("http://x", before, now))
    assert "fine-tuning" not in shown(frame_of("http://x", before, before))


def test_top_shows_a_server_without_a_router_by_its_metrics():
    with live_server(server={"api_key": "k" * 20}) as server:
        headers = {"authorization": "Bearer " + "k" * 20}
        for _ in range(3):
            httpx.post(f"{server.url}/v1/chat/completions", json=chat(), headers=headers)
        runner = CliRunner(env={"COLUMNS": "100", "LLM_ENGINE_API_KEY": "k" * 20})
        given = ["top", f"{server.url}/v1", "--once", "--interval", "0.2"]
        done = runner.invoke(app, [*given, "--json"])
        assert done.exit_code == 0, done.output
        frame = json.loads(done.stdout)
        (row,) = frame["backends"]
        assert (row["model"], row["name"], row["state"]) == (MODEL, "fake", "ready")
        assert row["requests"] == 3 and row["cache_hit_rate"] == 0.25
        assert row["ttft_p50_s"] > 0
        assert MODEL in runner.invoke(app, given).stdout
        refused = CliRunner(env={"LLM_ENGINE_API_KEY": "wrong"}).invoke(app, given)
        assert refused.exit_code == 2 and "--api-key-file" in refused.output


def test_top_distinguishes_an_unreachable_server_from_a_malformed_url():
    nobody = CliRunner().invoke(app, ["top", "http://127.0.0.1:1", "--once"])
    assert nobody.exit_code == 1 and "engine serve" in nobody.output
    assert CliRunner().invoke(app, ["top", "localhost"]).exit_code == 2


def test_top_shows_ttft_of_the_interval_or_else_of_all_requests():
    page = "\n".join(
        f'vllm:time_to_first_token_seconds_bucket{{le="{edge}",model_name="{model}"}} {count}'
        for model in "ab"
        for edge, count in (("0.1", 4), ("0.2", 4), ("+Inf", 5))
    )
    all_of_them = parse_metrics(page)
    before = routed(0.0)
    first = replace(before, routes=None, metrics=all_of_them)
    assert frame_of("u", first, replace(first, at=1.0)).ttft_p50_s == pytest.approx(0.0625)
    grown = {0.1: 8.0, 0.2: 10.0, float("inf"): 12.0}
    later = replace(first, at=1.0, metrics=ScrapedMetrics({}, grown))
    assert frame_of("u", first, later).ttft_p50_s == pytest.approx(0.15)


def test_quantiles_of_empty_and_unbounded_histograms():
    assert quantile([], 0.5) is None
    assert quantile([(1.0, 0.0), (float("inf"), 0.0)], 0.5) is None
    assert quantile([(1.0, 0.0), (float("inf"), 4.0)], 0.5) == 1.0


def test_top_rates_are_per_model_and_never_negative():
    def look(at: float, requests: int, ended: float) -> Look:
        models = [
            {"id": name, "policy": "prefix", "backends": [backend("fast", requests=count)]}
            for name, count in (("first", 100), ("smol", requests))
        ]
        metrics = ScrapedMetrics({"vllm:request_success_total": ended}, {})
        routes = {"models": models, "decisions": []}
        return Look(at, {"status": "healthy"}, metrics, ({"id": "smol"},), routes)

    frame = frame_of("http://x", look(10.0, 10, 500.0), look(12.0, 16, 0.0))
    assert [each.requests_per_s for each in frame.backends] == [0.0, 3.0]
    again = frame_of("http://x", look(10.0, 10, 500.0), look(12.0, 2, 0.0))
    assert [each.requests_per_s for each in again.backends] == [0.0, 0.0]
    assert again.requests_per_s == 0.0  # a new server counts from zero


def test_quantiles_are_interpolated_within_a_bucket():
    buckets = [(1.0, 10.0), (3.0, 30.0), (float("inf"), 40.0)]
    assert quantile(buckets, 0.5) == 2.0
    assert quantile(buckets, 0.25) == 1.0
    assert quantile(buckets, 0.95) == 3.0
    assert quantile([], 0.5) is None
