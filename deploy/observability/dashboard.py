"""Writes the Grafana dashboard of this folder: python deploy/observability/dashboard.py

A panel is a title, a unit and queries with their legends. `MODEL` selects the series of the models
that are chosen at the top of the dashboard.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).parent / "grafana" / "dashboards" / "engine.json"
MODEL = 'model_name=~"$model"'
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 8, 8  # of a panel; a row is 24 wide


class Panel(NamedTuple):
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]  # expression and legend
    about: str = ""
    stacks: bool = False


def rate(metric: str, labels: str = MODEL) -> str:
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({share}, sum by (le) ({rate(f'{metric}_bucket')}))", name)
        for share, name in ((0.5, "median"), (0.95, "95 %"), (0.99, "99 %"))
    )


def mean(metric: str) -> str:
    return f"sum({rate(f'{metric}_sum')}) / sum({rate(f'{metric}_count')})"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel(
            "Requests that ended",
            "reqps",
            ((f"sum by (outcome) ({rate('engine_requests_total')})", "{{outcome}}"),),
            stacks=True,
        ),
        Panel(
            "In flight, running, waiting",
            "short",
            (
                (f"sum(engine_requests_in_flight{{{MODEL}}})", "requests in flight"),
                (f"sum(engine_sequences_running{{{MODEL}}})", "sequences running"),
                (f"sum(engine_sequences_waiting{{{MODEL}}})", "sequences waiting"),
            ),
        ),
        Panel(
            "HTTP answers by status",
            "reqps",
            ((f"sum by (status) ({rate('engine_http_requests_total', '')})", "{{status}}"),),
            stacks=True,
        ),
    ),
    "Latency": (
        Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
        Panel("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds")),
        Panel(
            "Where a request's time goes",
            "s",
            tuple(
                (mean(f"vllm:request_{phase}_time_seconds"), phase)
                for phase in ("queue", "prefill", "decode")
            ),
            "Mean seconds per request.",
            stacks=True,
        ),
        Panel("Engine step", "s", quantiles("engine_step_seconds")),
        Panel(
            "Slow requests",
            "reqps",
            ((f"sum({rate('engine_slow_requests_total')})", "slower than logging.slow_request_s"),),
        ),
    ),
    "Throughput": (
        Panel(
            "Tokens",
            "short",
            (
                (f"sum({rate('engine_generated_tokens_total')})", "generated per second"),
                (f"sum({rate('engine_prompt_tokens_total')})", "prompt tokens per second"),
            ),
        ),
        Panel("Tokens per step", "short", ((mean("vllm:iteration_tokens_total"), "mean"),)),
        Panel("Prompt length", "short", quantiles("vllm:request_prompt_tokens")),
    ),
    "Cache": (
        Panel(
            "KV blocks",
            "short",
            ((f"sum by (state) (engine_kv_blocks{{{MODEL}}})", "{{state}}"),),
            "Blocks of the state `cached` are free for new sequences, too.",
            stacks=True,
        ),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            (
                (
                    f"sum({rate('engine_prefix_cache_hit_tokens_total')})"
                    f" / sum({rate('engine_prefix_cache_query_tokens_total')})",
                    "share",
                ),
            ),
        ),
        Panel(
            "Preemptions and evictions",
            "short",
            (
                (f"sum({rate('engine_preemptions_total')})", "preempted sequences per second"),
                (f"sum({rate('engine_evicted_blocks_total')})", "evicted blocks per second"),
            ),
        ),
    ),
    "Machine": (
        Panel(
            "CPU",
            "short",
            (
                (
                    f"sum by (process) ({rate('engine_process_cpu_seconds_total', '')})",
                    "{{process}}",
                ),
            ),
            "Cores in use.",
            stacks=True,
        ),
        Panel(
            "Memory",
            "bytes",
            (("sum by (process) (engine_process_resident_memory_bytes)", "{{process}}"),),
            stacks=True,
        ),
        Panel(
            "Readiness and restarts",
            "short",
            (
                (f"min(engine_ready{{{MODEL}}})", "ready"),
                (f"sum(increase(engine_restarts_total{{{MODEL}}}[1h]))", "restarts in an hour"),
                (
                    f"sum(increase(engine_revived_requests_total{{{MODEL}}}[1h]))",
                    "revived requests in an hour",
                ),
            ),
        ),
    ),
    "Router": (
        Panel(
            "Requests by backend",
            "reqps",
            (
                (
                    f"sum by (backend, outcome) ({rate('engine_backend_requests_total')})",
                    "{{backend}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "In flight by backend",
            "short",
            (("sum by (backend) (engine_backend_in_flight)", "{{backend}}"),),
        ),
        Panel(
            "Backends that are ready",
            "short",
            (("sum by (backend) (engine_backend_ready)", "{{backend}}"),),
        ),
    ),
}


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom = {
        "fillOpacity": 25 if panel.stacks else 8,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacks else "none"},
    }
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for n, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        number = len(made) + 1
        made.append({"id": number, "type": "row", "title": title, "gridPos": place, "panels": []})
        y += 1
        for index, panel in enumerate(panels):
            x = index * WIDTH % 24
            made.append(_panel(panel, len(made) + 1, x, y + index * WIDTH // 24 * HEIGHT))
        y += -(-len(panels) * WIDTH // 24) * HEIGHT
    return made


def dashboard() -> dict[str, Any]:
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    model = {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(engine_ready, model_name)", "refId": "model"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
    return {
        "uid": "engine",
        "title": "engine",
        "schemaVersion": 39,
        "tags": ["llm"],
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, model]},
        "panels": _panels(),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
