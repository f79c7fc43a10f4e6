"""`engine bench`: measures any OpenAI-compatible server under load."""

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.console import (
    SERVER_URL,
    ApiKeyFileOption,
    JsonOption,
    SameUrlOption,
    UrlArgument,
    messages,
    output,
    read_api_key,
)
from engine.core.errors import InferenceError, InvalidRequestError, UnavailableError

if TYPE_CHECKING:
    import httpx

# Each of these words is about one token in most vocabularies.
_WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water
room mother area money story fact month lot right study book eye job word business issue side kind
""".split()  # noqa: SIM905


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds since its start. `first_s` is the time to the first token."""

    first_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """What is sent. With a `rate`, requests start at random times, so many per second on average;
    without one, each of `concurrency` workers starts the next request when one has ended.
    """

    url: str
    model: str
    num_requests: int
    concurrency: int
    prompt_tokens: int
    max_tokens: int
    rate: float | None
    extra: dict[str, Any]
    draws: random.Random

    def body(self, number: int) -> dict[str, Any]:
        # Prompts differ in their first word, so that no server finds them in a prefix cache.
        words = [str(number), *self.draws.choices(_WORDS, k=max(1, self.prompt_tokens - 1))]
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


def bench(
    url: UrlArgument = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Default: its first.")] = None,
    requests: Annotated[
        int, typer.Option("--requests", "--num-prompts", min=1, help="Requests in all.")
    ] = 32,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "--max-concurrency", min=1, help="Requests at once.")
    ] = 8,
    prompt_tokens: Annotated[
        int,
        typer.Option("--prompt-tokens", "--random-input-len", min=1, help="Of a prompt, roughly."),
    ] = 128,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--random-output-len", min=1, help="Of each answer.")
    ] = 64,
    rate: Annotated[
        float | None,
        typer.Option("--rate", "--request-rate", min=0.001, help="Requests started per second."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers have max tokens; not every server can.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts.")] = 0,
    api_key_file: ApiKeyFileOption = None,
    as_json: JsonOption = False,
    same_url: SameUrlOption = None,
) -> None:
    """Send streamed chat requests to a server and report speed and waiting times."""
    url = same_url or url or SERVER_URL
    if not url.startswith(("http://", "https://")):
        raise InvalidRequestError(f"{url} is no address: begin it with http:// or https://.")
    key = read_api_key(api_key_file)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    extra = {"ignore_eos": True} if ignore_eos else {}

    def load(name: str) -> BenchLoad:
        sizes = (requests, concurrency, prompt_tokens, max_tokens)
        return BenchLoad(address, name, *sizes, rate, extra, random.Random(seed))

    with messages().status(f"Sending {requests} requests to {address} ..."):
        report = asyncio.run(_measure(address, model, headers, load))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    if report["failed"]:
        raise InferenceError(f"{report['failed']} requests failed: {report['errors'][0]}")


async def _measure(url: str, model: str | None, headers: dict[str, str], load: Any) -> Any:
    import httpx

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        headers=headers, timeout=600.0, limits=limits, trust_env=False
    ) as client:
        made: BenchLoad = load(model or await _first_model(client, url))
        began = time.monotonic()
        samples = await _send_all(client, made)
        return summarize(samples, time.monotonic() - began, made)


async def _first_model(client: "httpx.AsyncClient", url: str) -> str:
    import httpx

    from engine.cli.talk.chat_clients import model_ids

    try:
        reply = await client.get(f"{url}/models")
    except httpx.HTTPError as error:
        raise UnavailableError(
            f"Nothing answers at {url} ({error}). Start a server with `engine serve`, or"
            " give its address."
        ) from None
    if ids := model_ids(reply):
        return ids[0]
    raise UnavailableError(f"{url}/models lists no model; name one with --model.")


async def _send_all(client: "httpx.AsyncClient", load: BenchLoad) -> list[Sample]:
    bodies = [load.body(number) for number in range(load.num_requests)]
    if load.rate is not None:
        tasks = []
        for body in bodies:
            tasks.append(asyncio.create_task(_send(client, load.url, body)))
            await asyncio.sleep(load.draws.expovariate(load.rate))
        return list(await asyncio.gather(*tasks))
    places = asyncio.Semaphore(load.concurrency)

    async def in_turn(body: dict[str, Any]) -> Sample:
        async with places:
            return await _send(client, load.url, body)

    return list(await asyncio.gather(*map(in_turn, bodies)))


async def _send(client: "httpx.AsyncClient", url: str, body: dict[str, Any]) -> Sample:
    import httpx

    sample, began = Sample(), time.monotonic()
    try:
        async with client.stream("POST", f"{url}/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                text = (await reply.aread()).decode("utf-8", "replace")
                sample.error = f"{reply.status_code}: {text[:200]}"
                return sample
            async for line in reply.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _count(sample, json.loads(line.removeprefix("data: ")), began)
    except (httpx.HTTPError, ValueError) as error:
        sample.error = str(error) or type(error).__name__
    sample.total_s = time.monotonic() - began
    return sample


def _count(sample: Sample, chunk: dict[str, Any], began: float) -> None:
    if chunk.get("error"):
        sample.error = str(chunk["error"])
    deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
    texts = ("content", "reasoning_content", "reasoning")
    if any(delta.get(name) for delta in deltas for name in texts):
        sample.output_tokens += 1  # the usage at the end, if there is one, is exact
        if sample.first_s is None:
            sample.first_s = time.monotonic() - began
    if usage := chunk.get("usage"):
        sample.prompt_tokens = usage.get("prompt_tokens", 0)
        sample.output_tokens = usage.get("completion_tokens", sample.output_tokens)


def summarize(samples: list[Sample], seconds: float, load: BenchLoad) -> dict[str, Any]:
    """The report: totals, rates and percentiles. Failed requests count only as failed."""
    good = [sample for sample in samples if sample.error is None]
    first = [sample.first_s for sample in good if sample.first_s is not None]
    each = [
        (sample.total_s - sample.first_s) / (sample.output_tokens - 1)
        for sample in good
        if sample.first_s is not None and sample.output_tokens > 1
    ]
    generated = sum(sample.output_tokens for sample in good)
    prompts = sum(sample.prompt_tokens for sample in good)
    return {
        "url": load.url,
        "model": load.model,
        "requests": len(good),
        "failed": len(samples) - len(good),
        "errors": [sample.error for sample in samples if sample.error][:5],
        "seconds": round(seconds, 3),
        "prompt_tokens": prompts,
        "output_tokens": generated,
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(generated / seconds, 2),
        "total_tokens_per_s": round((prompts + generated) / seconds, 2),
        "time_to_first_token_ms": _percentiles(first),
        "time_per_output_token_ms": _percentiles(each),
        "request_ms": _percentiles([sample.total_s for sample in good]),
    }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ranked = sorted(seconds)
    shown = {"mean": sum(ranked) / len(ranked)}
    for percent in (50, 90, 99):
        shown[f"p{percent}"] = ranked[min(len(ranked) - 1, len(ranked) * percent // 100)]
    return {name: round(1000 * value, 2) for name, value in shown.items()}


def _print_report(report: dict[str, Any]) -> None:
    from rich.table import Table

    console = output()
    totals = Table(box=None, show_header=False, pad_edge=False)
    for name in ("model", "requests", "failed", "seconds", "prompt_tokens", "output_tokens"):
        totals.add_row(name.replace("_", " "), str(report[name]))
    for name in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s"):
        totals.add_row(name.replace("_per_s", "/s").replace("_", " "), f"{report[name]:.1f}")
    console.print(totals)
    table = Table("ms", "mean", "p50", "p90", "p99", box=None, pad_edge=False)
    for name in ("time_to_first_token_ms", "time_per_output_token_ms", "request_ms"):
        row = report[name] or {}
        label = name.removesuffix("_ms").replace("_", " ")
        table.add_row(label, *(f"{value:.1f}" for value in row.values()))
    console.print(table)
