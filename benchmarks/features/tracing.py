"""Measures what traces cost: CPU seconds per output token of a server with and without them.

`python -m benchmarks.features.tracing` starts both servers and an OTLP receiver. Rounds of streams
go to the servers in turn. CPU time is that of the server and its engine process.
"""

import argparse
import os
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx

from benchmarks.process import process_tree
from tests.support.servers.otlp_receiver import http_receiver
from tests.support.servers.served import ServedEngine, serve


def cpu_s(server: ServedEngine) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in process_tree(server.process.pid))


def ask(client: httpx.Client, number: int, num_tokens: int) -> int:
    """Read one stream. Returns its number of tokens."""
    body = {
        "prompt": f"{number} stories begin",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return int(answer.text.rpartition('"completion_tokens":')[2].split(",")[0].split("}")[0])


def one_round(server: ServedEngine, num_streams: int, num_tokens: int, seed: int) -> float:
    """CPU milliseconds per output token of one wave of streams."""
    before = cpu_s(server)
    client = httpx.Client(base_url=server.url, timeout=300, verify=False)
    with client, ThreadPoolExecutor(num_streams) as pool:
        numbers = range(seed, seed + num_streams)
        total = sum(pool.map(lambda each: ask(client, each, num_tokens), numbers))
    return (cpu_s(server) - before) / total * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with ExitStack() as stack:
        receiver = stack.enter_context(http_receiver())
        variables = {
            "LLM_ENGINE_TRACING__ENABLED": "true",
            "LLM_ENGINE_TRACING__ENDPOINT": receiver.url,
        }
        servers = {
            "plain": stack.enter_context(serve()),
            "traced": stack.enter_context(serve(env=os.environ | variables)),
        }
        figures: dict[str, list[float]] = {name: [] for name in servers}
        for number in range(-1, options.rounds):  # the first round warms up
            for name, server in servers.items():
                seed = 1000 * (number + 2)
                figure = one_round(server, options.streams, options.tokens, seed)
                if number >= 0:
                    figures[name].append(figure)
        shares = [
            traced / plain - 1
            for plain, traced in zip(figures["plain"], figures["traced"], strict=True)
        ]
        for name, found in figures.items():
            print(f"{name}: {statistics.median(found):.3f} CPU ms per output token (median)")
        print(f"traces cost {statistics.median(shares):+.2%} (median of {options.rounds} rounds)")
        threading.Event().wait(6)  # until the last batch of spans is sent
        print(f"{len(receiver.spans)} spans arrived")


if __name__ == "__main__":
    main()
