"""Measures how long the container of the Kubernetes manifests takes to be ready.

`python -m benchmarks.kubelet` starts its command with its environment, as the test of the same name
does, and asks the startup probe every 10 ms. The model is there, as after the init container.
"""

import argparse
import statistics
import time

from tests.e2e.test_kubelet import started


def seconds_to_ready() -> float:
    with started() as pod:
        begun = time.monotonic()
        while not pod.probe("startup"):
            time.sleep(0.01)
        return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    times = sorted(seconds_to_ready() for _ in range(parser.parse_args().rounds))
    print(f"ready after {statistics.median(times):.2f} s ({times[0]:.2f} to {times[-1]:.2f})")


if __name__ == "__main__":
    main()
