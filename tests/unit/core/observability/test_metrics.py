"""Metrics: names that dashboards query, totals across snapshots and restarts, and fixed labels."""

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.core.interfaces.backend import UsageEvent
from engine.core.interfaces.stats import EngineStats, TierStats
from engine.core.observability.metrics import MAX_NOTED, FinishedRequest, Metrics
from engine.runtime.budget import StepCounter

LABELS = {"model_name": "m", "engine": "0"}
REQUEST = FinishedRequest(
    finish_reasons=("stop",),
    choice_tokens=(11,),
    max_tokens=32,
    ttft_s=0.2,
    e2e_s=0.7,
    usage=UsageEvent(100, 11, 64, queue_s=0.01, prefill_s=0.1, decode_s=0.4),
)

# What the panels of vLLM's own dashboards and the Kubernetes inference extension ask for.
DASHBOARD_SERIES = (
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:generation_tokens_total",
    "vllm:gpu_cache_usage_perc",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:iteration_tokens_total_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_max_num_generation_tokens_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_prefill_kv_computed_tokens_bucket",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, LABELS | labels)


def test_dashboard_series_exist_before_any_request(metrics: Metrics) -> None:
    content, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(content.decode())
    samples = {sample.name: sample.labels for family in families for sample in family.samples}
    for name in DASHBOARD_SERIES:
        assert LABELS.items() <= samples[name].items()
    assert not [name for name in samples if name.endswith("_created")]


def test_requests_in_flight_are_counted_when_scraped(metrics: Metrics) -> None:
    pumps = [object(), object()]
    metrics.watch_in_flight(lambda: len(pumps))
    assert value(metrics, "engine_requests_in_flight") == 2
    pumps.pop()
    assert value(metrics, "engine_requests_in_flight") == 1


def test_finished_request_reaches_every_histogram(metrics: Metrics) -> None:
    metrics.request_finished(REQUEST)
    assert value(metrics, "engine_requests_total", outcome="ok") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    expected = {
        "vllm:e2e_request_latency_seconds": 0.7,
        "vllm:time_to_first_token_seconds": 0.2,
        "vllm:request_queue_time_seconds": 0.01,
        "vllm:request_prefill_time_seconds": 0.1,
        "vllm:request_decode_time_seconds": 0.4,
        "vllm:request_inference_time_seconds": 0.5,
        "vllm:request_time_per_output_token_seconds": 0.05,
        "vllm:request_prompt_tokens": 100,
        "vllm:request_prefill_kv_computed_tokens": 36,
        "vllm:request_generation_tokens": 11,
        "vllm:request_params_n": 1,
        "vllm:request_params_max_tokens": 32,
    }
    for name, total in expected.items():
        assert value(metrics, name + "_sum") == pytest.approx(total), name
        assert value(metrics, name + "_count") == 1, name


def test_finish_reasons_and_tokens_are_counted_per_choice(metrics: Metrics) -> None:
    metrics.request_finished(
        replace(REQUEST, finish_reasons=("stop", "length"), choice_tokens=(3, 8))
    )
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum") == 8
    assert value(metrics, "vllm:request_generation_tokens_sum") == 11
    # Choices run side by side, so the time per token is that of the longest.
    name = "vllm:request_time_per_output_token_seconds_sum"
    assert value(metrics, name) == pytest.approx(0.5 / 7)


def test_unknown_figures_of_an_aborted_request_are_not_counted_as_zero(metrics: Metrics) -> None:
    metrics.request_finished(replace(REQUEST, finish_reasons=("abort",), usage=None))
    assert value(metrics, "engine_requests_total", outcome="abort") == 1
    assert value(metrics, "vllm:request_generation_tokens_sum") == 11
    assert value(metrics, "vllm:request_queue_time_seconds_count") == 0
    assert value(metrics, "vllm:request_prompt_tokens_count") == 0


def test_a_refused_request_is_not_counted_as_an_engine_error(metrics: Metrics) -> None:
    metrics.request_refused()
    assert value(metrics, "engine_requests_total", outcome="refused") == 1
    assert value(metrics, "engine_requests_total", outcome="error") == 0
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 0


def test_request_without_tokens_has_no_token_times(metrics: Metrics) -> None:
    metrics.request_finished(
        replace(REQUEST, finish_reasons=("error",), choice_tokens=(0,), ttft_s=None)
    )
    assert value(metrics, "engine_requests_total", outcome="error") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 0


def test_engine_snapshots_increase_counters_by_their_difference(metrics: Metrics) -> None:
    steps = StepCounter()

    def stats(*sizes: int, **totals: int) -> EngineStats:
        for size in sizes:
            steps.add(size, 0.25)
        return EngineStats(steps=steps.counts(), **totals)

    first = stats(1, 9, num_steps=2, prompt_tokens=10, prefix_hits=4, generated_tokens=1)
    second = stats(2, 2, 2, num_steps=5, prompt_tokens=30, prefix_hits=4, generated_tokens=9)
    for snapshot in (first, first, second):
        metrics.observe(snapshot)
    assert value(metrics, "vllm:prompt_tokens_total") == 30
    assert value(metrics, "engine_prompt_tokens_total") == 30
    assert value(metrics, "engine_prefix_cache_hit_tokens_total") == 4
    assert value(metrics, "vllm:generation_tokens_total") == 9
    assert value(metrics, "engine_step_seconds_count") == 5
    assert value(metrics, "engine_step_seconds_sum") == 1.25
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 16
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="2.0") == 4


@pytest.mark.parametrize("announced", [True, False])
def test_totals_survive_an_engine_restart(metrics: Metrics, announced: bool) -> None:
    metrics.observe(EngineStats(num_steps=100, prompt_tokens=500))
    if announced:
        metrics.set_ready(False)
        metrics.engine_restarted()
    metrics.observe(EngineStats(num_steps=1, prompt_tokens=7))
    assert value(metrics, "vllm:prompt_tokens_total") == 507
    assert value(metrics, "engine_restarts_total") == (1 if announced else 0)


def test_totals_are_right_if_the_restarted_engines_counters_are_higher(metrics: Metrics) -> None:
    metrics.observe(EngineStats(num_steps=1, prompt_tokens=5))
    metrics.engine_restarted()
    metrics.observe(EngineStats(num_steps=9, prompt_tokens=6))
    assert value(metrics, "vllm:prompt_tokens_total") == 11


def test_kv_block_states_add_up_and_vanish_with_the_engine(metrics: Metrics) -> None:
    stats = EngineStats(
        num_running=2,
        num_waiting=3,
        num_blocks=100,
        num_free_blocks=50,
        num_cached_blocks=40,
        num_referenced_blocks=20,
        block_size=16,
    )
    metrics.observe(stats)
    states = {s: value(metrics, "engine_kv_blocks", state=s) for s in ("free", "used", "cached")}
    assert states == {"free": 50, "used": 20, "cached": 30}
    assert value(metrics, "vllm:kv_cache_usage_perc") == pytest.approx(0.2)
    assert value(metrics, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    metrics.set_ready(False)
    assert value(metrics, "vllm:num_requests_running") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0
    assert value(metrics, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100") is None


def test_windowed_blocks_have_own_metrics_and_usage_is_the_fuller_pools(
    metrics: Metrics,
) -> None:
    metrics.observe(
        EngineStats(
            num_blocks=100,
            num_free_blocks=80,
            num_referenced_blocks=10,
            num_window_blocks=20,
            num_free_window_blocks=3,
            num_referenced_window_blocks=15,
        )
    )
    name = "engine_kv_window_blocks"
    states = {state: value(metrics, name, state=state) for state in ("free", "used", "cached")}
    assert states == {"free": 3, "used": 15, "cached": 2}
    assert value(metrics, "vllm:kv_cache_usage_perc") == pytest.approx(0.75)


def test_clients_cannot_add_metric_series(metrics: Metrics) -> None:
    metrics.http_request("/v1/models/{model_id:path}", "GET", 200, 0.1)
    metrics.http_request(None, "GET", 404, 0.1)
    metrics.http_request(None, "BREW", 404, 0.1)
    before = metrics.render()[0].count(b"\n")
    for number in range(50):
        metrics.http_request(None, f"METHOD{number}", 404, 0.1)
    assert metrics.render()[0].count(b"\n") == before


def test_process_metrics_cover_server_and_worker(metrics: Metrics) -> None:
    memory = metrics.registry.get_sample_value(
        "engine_process_resident_memory_bytes", {"process": "server"}
    )
    assert memory is not None
    assert memory > 2**20
    for name in ("engine_process_cpu_seconds_total", "engine_process_threads"):
        assert metrics.registry.get_sample_value(name, {"process": "worker"}) is not None


@pytest.mark.parametrize("count", [3, MAX_NOTED + 3])
def test_inter_token_latency_is_exported_under_both_names(metrics: Metrics, count: int) -> None:
    for _ in range(count):
        metrics.inter_token(0.02)
    metrics.inter_token(0.1, 4)  # four tokens in a chunk: 0.025 each, which is an edge
    metrics.inter_token(100.0)
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        assert value(metrics, f"{name}_bucket", le="0.01") == 0
        assert value(metrics, f"{name}_bucket", le="0.025") == count + 1
        assert value(metrics, f"{name}_bucket", le="80.0") == count + 1
        assert value(metrics, f"{name}_bucket", le="+Inf") == count + 2
        assert value(metrics, f"{name}_count") == count + 2
        assert value(metrics, f"{name}_sum") == pytest.approx(100.025 + 0.02 * count)


def test_tiers_have_metrics_only_if_there_are_tiers() -> None:
    metrics = Metrics("m")
    metrics.observe(EngineStats(num_steps=1))
    assert b"engine_cache_tier" not in metrics.render()[0]
    tier = TierStats(name="disk", hits=3, saved_tokens=48, is_up=False)
    metrics.observe(EngineStats(num_steps=2, tiers=(tier,)))
    shown = metrics.render()[0].decode()
    assert 'engine_cache_tier_hits_total{tier="disk"} 3.0' in shown
    assert 'engine_cache_tier_saved_tokens_total{tier="disk"} 48.0' in shown
    assert 'engine_cache_tier_up{tier="disk"} 0.0' in shown
