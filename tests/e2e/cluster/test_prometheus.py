"""A real Prometheus scrapes a busy server: every panel of our dashboard and of vLLM's has data."""

import math
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import httpx
import pytest

from tests.support.servers.live_server import free_port, wait_until
from tests.support.servers.served import ServedEngine, serve
from tests.unit.core.observability.test_observability_files import expressions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus"),
]
LOAD_S = 60.0
ROUTED = """
[backends.fast]
kind = "native"
model = "smollm2-135m-instruct"
[models.smol]
backends = ["fast"]
"""
SCRAPING = """
global: {{ scrape_interval: 1s }}
scrape_configs:
  - job_name: engine
    static_configs: [{{ targets: ["{target}"] }}]
"""
# What the panels of vLLM's dashboards ask for, in each of their forms.
LATENCIES = tuple(
    f"vllm:{name}_seconds"
    for name in ("e2e_request_latency", "inter_token_latency", "time_to_first_token")
)
MODEL = '{model_name="$model_name"}'
VLLM = [
    *(
        f"histogram_quantile({share}, sum by(le) (rate({name}_bucket{MODEL}[$__rate_interval])))"
        for share, name in product((0.99, 0.95, 0.9, 0.5), LATENCIES)
    ),
    *(
        f"rate({name}_sum{MODEL}[$__rate_interval]) / rate({name}_count{MODEL}[$__rate_interval])"
        for name in LATENCIES
    ),
    *(
        f"sum(increase({name}_sum[$__range])) / sum(increase({name}_count[$__range]))"
        for name in LATENCIES
    ),
    *(
        f"sum by(le) (increase(vllm:request_{kind}_tokens_bucket{MODEL}[$__rate_interval]))"
        for kind in ("prompt", "generation")
    ),
    *(
        f"rate(vllm:request_{name}_sum{MODEL}[$__rate_interval])"
        for name in (
            *(f"{phase}_time_seconds" for phase in ("queue", "prefill", "decode")),
            "max_num_generation_tokens",
        )
    ),
    *(
        f"rate(vllm:{name}{MODEL}[$__rate_interval])"
        for name in ("prompt_tokens_total", "generation_tokens_total")
    ),
    *(
        f"vllm:{name}{MODEL}"
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    ),
    f"sum by(finished_reason) (increase(vllm:request_success_total{MODEL}[$__rate_interval]))",
    "sum by (model_name) (rate(vllm:request_success_total[$__rate_interval]))",
    "histogram_quantile(0.99, sum by(le, model_name)"
    " (rate(vllm:request_prompt_tokens_bucket[$__rate_interval])))",
    "sum(rate(vllm:prompt_tokens_total[$__rate_interval]))"
    " / sum(rate(vllm:request_success_total[$__rate_interval]))",
    "rate(vllm:iteration_tokens_total_count[$__interval])",
]


@contextmanager
def prometheus(folder: Path, server: ServedEngine) -> Iterator[str]:
    target = server.url.removeprefix("http://")
    (folder / "prometheus.yml").write_text(SCRAPING.format(target=target))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


def use(server: ServedEngine, seconds: float) -> None:
    """Two streams at a time, of prompts that share a prefix and of prompts that do not."""
    deadline = time.monotonic() + seconds

    def ask(number: int) -> None:
        while time.monotonic() < deadline:
            number += 2
            text = f"{'Count the stars. ' * 20} {number if number % 4 else ''}"
            body = {"model": "smol", "prompt": text, "max_tokens": 8 + number % 8, "stream": True}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).is_success

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def values(url: str, expression: str, model: str) -> list[float]:
    for name, value in {
        "$model_name": model,
        "$model": ".*",
        "$__rate_interval": "30s",
        "$__interval": "30s",
        "$__range": "1m",
    }.items():
        expression = expression.replace(name, value)
    reply = httpx.get(f"{url}/api/v1/query", params={"query": expression}).json()
    assert reply["status"] == "success", (expression, reply)
    return [float(series["value"][1]) for series in reply["data"]["result"]]


def test_every_dashboard_panel_has_data(default_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "engine.toml"
    config.write_text(ROUTED)
    with serve("--config", str(config)) as server, prometheus(tmp_path, server) as url:
        use(server, LOAD_S)
        wait_until(lambda: values(url, "up", "") == [1.0])
        labels = httpx.get(f"{url}/api/v1/label/model_name/values").json()["data"]
        reply = httpx.get(
            f"{url}/api/v1/query", params={"query": "vllm:prompt_tokens_total"}
        ).json()
        model = reply["data"]["result"][0]["metric"]["model_name"]
        assert model in labels
        found = {each: values(url, each, model) for each in (*VLLM, *expressions())}
    without = [
        each for each, data in found.items() if not any(math.isfinite(value) for value in data)
    ]
    assert not without
    assert len(found) > 60
