"""Measures what the live view costs: CPU seconds per output token of a server, watched and not.

`python -m benchmarks.features.live_view` starts one server. Rounds of streams alternate between
those with a client that reads `/v1/admin/live` and those without. CPU time is that of the server
and its engine process.
"""

import argparse
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from benchmarks.features.tracing import one_round
from tests.support.servers.served import ServedEngine, serve


@contextmanager
def watching(server: ServedEngine) -> Iterator[list[int]]:
    """Read the live view in a thread. Yields a list that gets the size of each frame."""
    sizes: list[int] = []
    stop = threading.Event()

    def read() -> None:
        with httpx.stream("GET", f"{server.url}/v1/admin/live", timeout=60) as answer:
            for chunk in answer.iter_bytes():
                sizes.append(len(chunk))
                if stop.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield sizes
    finally:
        stop.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    shares, frames = [], 0
    with serve("--memory-pool-size-mb", "512") as server:
        one_round(server, options.streams, options.tokens, 0)  # warms up
        for number in range(options.rounds):
            seed = 10_000 * (number + 1)
            closed = one_round(server, options.streams, options.tokens, seed)
            with watching(server) as sizes:
                opened = one_round(server, options.streams, options.tokens, seed + 5000)
            frames += len(sizes)
            shares.append(opened / closed - 1)
            print(f"closed {closed:.3f}, open {opened:.3f} CPU ms per output token")
    cost = statistics.median(shares)
    print(f"the live view costs {cost:+.2%} (median of {options.rounds} rounds), {frames} frames")


if __name__ == "__main__":
    main()
