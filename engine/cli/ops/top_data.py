"""Collects the data of `engine top`: a server's current routes and metrics, and how they changed
since the last poll.

For metrics that vLLM also has, our server uses vLLM's names. So a vLLM server can be shown too.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from engine.core.errors import AuthenticationError, UnavailableError

ROUTES = "/v1/admin/routes"
SNAPSHOT = "/v1/admin/snapshot"
_TTFT = "vllm:time_to_first_token_seconds_bucket"


@dataclass(frozen=True, slots=True)
class ScrapedMetrics:
    """The samples of a Prometheus metrics page. `values` maps a metric's name to the sum of its
    samples over all labels. If a metric has the label `outcome`, there is also a sum per outcome,
    under the key `name[outcome]`.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    # Histogram of the time to first token: upper edge of a bucket in s -> cumulative count.
    first_tokens: Mapping[float, float] = field(default_factory=dict)

    def sum(self, *names: str) -> float | None:
        """The sum of the named metrics that exist; None if none of them exists."""
        found = [self.values[name] for name in names if name in self.values]
        return sum(found) if found else None


@dataclass(frozen=True, slots=True)
class Look:
    """The result of one poll of a server. `routes` is None if the server is not ours."""

    at: float  # when the server was polled, by time.monotonic()
    health: Mapping[str, Any]
    metrics: ScrapedMetrics
    models: tuple[Mapping[str, Any], ...]
    routes: Mapping[str, Any] | None
    engines: tuple[Mapping[str, Any], ...] = ()  # of `/v1/admin/snapshot`

    @property
    def has_router(self) -> bool:
        """Whether the server has a router. Our server also answers the routes request without a
        router, but then has no figures per backend.
        """
        models = (self.routes or {}).get("models", ())
        return any(model["policy"] is not None for model in models)

    def requests_of(self, model: str, backend: str) -> int:
        for each in (self.routes or {}).get("models", ()):
            for member in each["backends"]:
                if each["id"] == model and member["name"] == backend:
                    return int(member["requests"])
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    model: str
    name: str
    kind: str
    state: str
    detail: str
    in_flight: int
    max_concurrent: int | None
    requests: int
    requests_per_s: float
    failures: int
    tokens_per_s: float
    ttft_p50_s: float | None
    cache_hit_rate: float | None
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The figures that one refresh of the view shows."""

    url: str
    status: str
    uptime_s: float | None
    memory_mb: float | None
    in_flight: int
    requests_per_s: float
    tokens_per_s: float
    ttft_p50_s: float | None
    cache_hit_rate: float | None
    backends: tuple[BackendRow, ...]
    decisions: tuple[Mapping[str, Any], ...]  # the router's latest decisions, newest first
    engines: tuple[Mapping[str, Any], ...] = ()  # what our own engines are doing
    training: str = ""  # how far the fine-tuning job is that trains now


async def look(client: httpx.AsyncClient) -> Look:
    """Poll the server. Raises `UnavailableError` if the server does not answer, and
    `AuthenticationError` if it does not accept the key.
    """
    try:
        paths = (ROUTES, "/health", "/metrics", "/v1/models", SNAPSHOT)
        routes, health, metrics, models, snapshot = await asyncio.gather(
            *(client.get(path) for path in paths)
        )
    except httpx.HTTPError as error:
        raise UnavailableError(
            f"Nothing answers at {client.base_url}: {error or type(error).__name__}."
            " Start a server with `engine serve`, or give its address."
        ) from None
    if 401 in (routes.status_code, models.status_code):
        raise AuthenticationError(
            f"{client.base_url} wants another key: set LLM_ENGINE_API_KEY or use --api-key-file."
        )
    listed = _json(models).get("data", [])
    if models.status_code != 200 or not isinstance(listed, list):
        raise UnavailableError(
            f"{client.base_url} lists no models in /v1/models (HTTP {models.status_code});"
            " is it an OpenAI-compatible server?"
        )
    return Look(
        at=time.monotonic(),
        health={"status": "unhealthy" if health.status_code == 503 else "healthy"} | _json(health),
        metrics=parse_metrics(metrics.text) if metrics.status_code == 200 else ScrapedMetrics(),
        models=tuple(listed),
        routes=_json(routes) if routes.status_code == 200 else None,
        # Other servers have no snapshot, and ours shows it to administrators only.
        engines=tuple(_json(snapshot).get("engines", ())) if snapshot.status_code == 200 else (),
    )


def _json(reply: httpx.Response) -> dict[str, Any]:
    try:
        body = reply.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def parse_metrics(text: str) -> ScrapedMetrics:
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    edges: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == _TTFT:
                edge = float(sample.labels["le"])
                edges[edge] = edges.get(edge, 0.0) + sample.value
                continue
            outcome = sample.labels.get("outcome")
            for name in (sample.name, f"{sample.name}[{outcome}]") if outcome else (sample.name,):
                values[name] = values.get(name, 0.0) + sample.value
    return ScrapedMetrics(values, edges)


def frame_of(url: str, before: Look, now: Look) -> Frame:
    """Compute the rates and other figures of a frame from two polls of a server."""
    elapsed_s = max(now.at - before.at, 1e-6)

    def rate(*names: str) -> float:
        grown = (now.metrics.sum(*names) or 0.0) - (before.metrics.sum(*names) or 0.0)
        # `grown` is negative after a restart of the server, which resets its counters.
        return max(grown, 0.0) / elapsed_s

    metrics = now.metrics
    rows = _routed(before, now, elapsed_s) if now.has_router else ()
    in_flight = metrics.sum("engine_requests_in_flight")
    if in_flight is None:
        in_flight = metrics.sum("vllm:num_requests_running", "vllm:num_requests_waiting")
    hits = metrics.sum("vllm:prefix_cache_hits_total")
    queries = metrics.sum("vllm:prefix_cache_queries_total")
    frame = Frame(
        url=url,
        status=str(now.health["status"]),
        uptime_s=now.health.get("uptime_seconds"),
        memory_mb=now.health.get("memory_usage_mb"),
        in_flight=int(in_flight or sum(row.in_flight for row in rows)),
        requests_per_s=rate("vllm:request_success_total"),
        tokens_per_s=max(
            rate("vllm:generation_tokens_total"), sum(row.tokens_per_s for row in rows)
        ),
        ttft_p50_s=_first_token_p50(before.metrics, metrics),
        cache_hit_rate=hits / queries if hits is not None and queries else None,
        backends=rows,
        decisions=tuple((now.routes or {}).get("decisions", ())),
        engines=now.engines,
        training=_training(metrics),
    )
    return frame if rows else _with_models(frame, now)


def _training(metrics: ScrapedMetrics) -> str:
    names = ("step", "steps", "loss", "tokens_per_second", "held")
    found = [metrics.sum(f"engine_finetuning_{name}") or 0.0 for name in names]
    step, num_steps, loss, rate, held = found
    if not rate and not held:
        return ""
    pace = "held while requests are open" if held else f"{rate:.0f} tok/s"
    return f"fine-tuning: step {step:.0f} of {num_steps:.0f}, loss {loss:.3f}, {pace}"


def _routed(before: Look, now: Look, elapsed_s: float) -> tuple[BackendRow, ...]:
    return tuple(
        BackendRow(
            model=model["id"],
            name=each["name"],
            kind=each["kind"],
            state=each["state"],
            detail=each["detail"] or "",
            in_flight=each["in_flight"],
            max_concurrent=each["max_concurrent"],
            requests=each["requests"],
            requests_per_s=max(each["requests"] - before.requests_of(model["id"], each["name"]), 0)
            / elapsed_s,
            failures=each["failures"],
            tokens_per_s=each["tokens_per_s"] or 0.0,
            ttft_p50_s=each["ttft_p50_s"],
            cache_hit_rate=each["prefix_hit_rate"],
            restarts=each["restarts"],
        )
        for model in (now.routes or {})["models"]
        for each in model["backends"]
    )


def _with_models(frame: Frame, now: Look) -> Frame:
    """Add a row for the only backend of a server without a router. Its figures are those of the
    whole server.
    """
    metrics = now.metrics
    rows = tuple(
        BackendRow(
            model=str(model.get("id", "")),
            name=str(model.get("backend") or model.get("owned_by") or ""),
            kind=str(model.get("backend") or ""),
            state="ready" if frame.status == "healthy" else "down",
            detail=str(now.health.get("detail") or ""),
            in_flight=frame.in_flight,
            max_concurrent=None,
            requests=int(metrics.sum("vllm:request_success_total") or 0),
            requests_per_s=frame.requests_per_s,
            failures=int(metrics.sum("engine_requests_total[error]") or 0),
            tokens_per_s=frame.tokens_per_s,
            ttft_p50_s=frame.ttft_p50_s,
            cache_hit_rate=frame.cache_hit_rate,
            restarts=int(metrics.sum("engine_restarts_total") or 0),
        )
        for model in now.models[:1]
    )
    return replace(frame, backends=rows)


def _first_token_p50(before: ScrapedMetrics, now: ScrapedMetrics) -> float | None:
    """Median time to first token, in seconds, of the requests since the last poll. If there were no
    such requests, the median of all requests since the server started.
    """
    recent = {
        edge: count - before.first_tokens.get(edge, 0.0) for edge, count in now.first_tokens.items()
    }
    found = quantile(recent.items(), 0.5)
    return found if found is not None else quantile(now.first_tokens.items(), 0.5)


def quantile(buckets: Iterable[tuple[float, float]], share: float) -> float | None:
    """A quantile of a histogram with cumulative counts, interpolated linearly within a bucket. None
    if the histogram is empty. `share` is 0.5 for the median.
    """
    ordered = sorted(buckets)
    total = ordered[-1][1] if ordered else 0.0
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for edge, count in ordered:
        if count >= share * total:
            if edge == float("inf") or count == below:
                return lower
            return lower + (edge - lower) * (share * total - below) / (count - below)
        lower, below = edge, count
    return lower
