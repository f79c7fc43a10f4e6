"""Measures how long the container of the Kubernetes manifests takes to be ready, and whether it
loses requests when it is told to stop.

`python -m benchmarks.cluster.kubelet` starts its command with its environment, as the test of the
same name does, and asks the startup probe every 10 ms. The model is there, as after the init
container. In the last round it gets SIGTERM while it streams. Prints one JSON line and exits with 1
if a bar is missed.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time

from tests.e2e.cluster.test_kubelet import NUM_STREAMS, started, stop_under_load

MAX_READY_S = 2.0


def seconds_to_ready() -> float:
    with started() as pod:
        begun = time.monotonic()
        while not pod.probe("startup"):
            time.sleep(0.01)
        return time.monotonic() - begun


def num_lost() -> int:
    """Streams that did not end as they should after SIGTERM."""
    with started() as pod:
        while not pod.probe("startup"):
            time.sleep(0.01)
        texts = asyncio.run(stop_under_load(pod))
        pod.process.wait(60)
        return NUM_STREAMS - sum(map(bool, texts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    times = sorted(seconds_to_ready() for _ in range(parser.parse_args().rounds))
    figure = {
        "ready_s": round(statistics.median(times), 2),
        "fastest_s": round(times[0], 2),
        "slowest_s": round(times[-1], 2),
        "streams": NUM_STREAMS,
        "lost": num_lost(),
    }
    ok = figure["ready_s"] <= MAX_READY_S and figure["lost"] == 0
    print(json.dumps({"kubelet": figure, "bar_ready_s": MAX_READY_S, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
