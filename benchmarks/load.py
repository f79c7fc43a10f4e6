"""Load generator for any OpenAI-compatible server; prints one JSON line.

    python -m benchmarks.load single --base-url http://127.0.0.1:8000
    python -m benchmarks.load conc --concurrency 32
    python -m benchmarks.load cold --command 'engine serve --port 8000'   # start to first token

Repeating the same command on a live server hits its prefix cache: change --seed.
"""

import argparse
import asyncio
import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.client import Target, first_model, new_session
from benchmarks.figures import spread
from benchmarks.process import (
    ServerError,
    ServerProcess,
    ServerSpec,
    exit_on_sigterm,
    peak_rss_mb,
)
from benchmarks.scenarios import SCENARIOS, Scenario, measure


def main() -> None:
    options = _parser().parse_args()
    options.base_url = options.base_url.rstrip("/").removesuffix("/v1")
    extra = json.loads(options.extra)
    exit_on_sigterm()
    work = _cold_starts(options, extra) if options.scenario == "cold" else _load(options, extra)
    figures = asyncio.run(work)
    print(json.dumps(figures), flush=True)
    sys.exit(1 if figures["failed"] else 0)


async def _load(options: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Any]:
    model = options.model
    if model is None:
        async with new_session(options.timeout) as session:
            model = await first_model(session, options.base_url)
    return await measure(
        _chosen_scenario(options),
        Target(options.base_url, model, extra),
        seed=options.seed,
        repeat=options.repeat,
        warmup=options.warmup,
        pid=options.pid,
        timeout=options.timeout,
    )


async def _cold_starts(options: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Any]:
    """Start the command, wait for one completion, stop it. The first start may fill caches."""
    port = urlsplit(options.base_url).port or 80
    command = tuple(shlex.split(options.command))
    spec = ServerSpec("server", command, port, model=options.model, extra_body=extra)
    ready, first, memory, errors = [], [], [], []
    for _ in range(options.repeat):
        process = ServerProcess(spec, Path(os.devnull))
        try:
            running = await process.start(options.timeout)
            ready.append(running.ready_s)
            first.append(running.first_completion_s)
            memory.append(peak_rss_mb(running.pid))
        except ServerError as error:
            errors.append(str(error))
        finally:
            process.stop()
    return {
        "scenario": "cold",
        "failed": len(errors),
        "errors": errors,
        "ready_s": spread(ready),
        "cold_start_s": spread(first),
        "each_s": [round(seconds, 2) for seconds in first],
        "rss_after_first_mb": spread(memory),
    }


def _chosen_scenario(options: argparse.Namespace) -> Scenario:
    given = {
        "concurrency": options.concurrency,
        "requests": options.requests,
        "prompt_words": options.prompt_words,
        "prefix_words": options.prefix_words,
        "output_tokens": options.output_tokens,
        "turns": options.turns,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(SCENARIOS[options.scenario], **chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", choices=[*SCENARIOS, "cold"])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first one that /v1/models names")
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--requests", type=int, help="per repeat; chat: conversations")
    parser.add_argument("--prompt-words", type=int, help="about one token each")
    parser.add_argument("--prefix-words", type=int)
    parser.add_argument("--output-tokens", type=int)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", default="0")
    parser.add_argument(
        "--extra", default='{"ignore_eos": true}', help="JSON merged into every request body"
    )
    parser.add_argument("--pid", type=int, help="server process: adds its memory and CPU use")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--command", help="cold: what starts the server in the foreground")
    return parser


if __name__ == "__main__":
    main()
