"""What a request that reads and changes activations costs: the others in its batch, and itself.

`python -m benchmarks.features.interp` runs 32 greedy streams in one process, alternately all plain,
and with one of them captured and steered, and prints the ratios of CPU seconds per output token (on
a GPU: of seconds per step), each the median of seven rounds. The bars are 0.98 for the batch and
0.95 for a steered stream alone (0.95 for both on a GPU).
"""

import argparse
import json
import time
from statistics import median
from typing import Any

import numpy as np

from engine.architectures.sites import site_name
from engine.core.interfaces.interp import Capture, Edit, InterpRequest
from engine.core.interfaces.request import GenerateRequest, SamplingParams
from engine.core.store.model_store import resolve_model
from engine.ipc.options import EngineOptions
from engine.tools.profiling import ListChannel
from engine.weights.model import open_model
from engine.worker.loading import load_runner
from engine.worker.main import build_loop, planned

ROUNDS = 7
STREAMS, PROMPT, NEW = 32, 32, 96


class Bench:
    """A model with its engine loop, in this thread."""

    def __init__(self, model: str, framework: str, device: str) -> None:
        path = resolve_model(model)
        options = planned(
            EngineOptions(
                model_path=str(path),
                framework=framework,
                device=device,
                max_slots=STREAMS,
                max_seq_len=512,
                cache_enabled=False,
                speculation="off",
            )
        )
        source = open_model(path)
        self.config = source.config
        self.on_gpu = device != "cpu"
        self.runner, _, plan = load_runner(source, options)
        self.channel = ListChannel()
        self._loop = build_loop(self.runner, options, plan.bytes_per_token, self.channel)
        self._rng = np.random.default_rng(0)

    def seconds_per_token(self, requests: list[GenerateRequest]) -> float:
        """CPU seconds of all threads per generated token. On a GPU, seconds per step."""
        self.channel.answers.clear()
        self.channel.inbox.extend(requests)
        began, clock = time.process_time(), time.perf_counter
        times = []
        while True:
            at = clock()
            self._loop.turn(0.0)
            times.append(clock() - at)
            if not self._loop.scheduler.has_work:
                break
        self._loop.turn(0.0)
        used = time.process_time() - began
        deltas = [d for _, message in self.channel.answers for d in message.deltas]
        failed = [d.error_message for d in deltas if d.finish_reason == "error"]
        assert not failed, failed
        tokens = sum(len(d.token_ids) for d in deltas)
        return median(times) if self.on_gpu else used / tokens

    def requests(self, count: int, probed: int) -> list[GenerateRequest]:
        """The first `probed` of `count` streams are captured and steered in the middle layer."""
        layer = self.config.num_layers // 2
        site, width = site_name(layer, "resid_post"), self.config.hidden_size
        vector = self._rng.normal(size=width).astype(np.float32).tobytes()
        interp = InterpRequest((Capture(site),), (Edit(site, "add", 0.01, (vector,)),))
        params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        return [
            GenerateRequest(
                request_id=f"{index}",
                prompt=tuple(self._rng.integers(1, self.config.vocab_size, PROMPT).tolist()),
                params=params,
                interp=interp if index < probed else None,
            )
            for index in range(count)
        ]


def compare(bench: Bench, streams: int) -> dict[str, Any]:
    """Rates of a batch with one probed stream, relative to the same batch without."""
    found: dict[int, list[float]] = {0: [], 1: []}
    for probed in (0, 1):
        bench.seconds_per_token(bench.requests(streams, probed))  # kernels and graphs are made
    for number in range(ROUNDS):
        for probed in (0, 1) if number % 2 else (1, 0):
            found[probed].append(bench.seconds_per_token(bench.requests(streams, probed)))
    plain, tapped = median(found[0]), median(found[1])
    return {"streams": streams, "plain": plain, "probed": tapped, "ratio": plain / tapped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    bench = Bench(arguments.model, arguments.backend, arguments.device)
    for streams in (STREAMS, 1):
        made = compare(bench, streams)
        unit = "step" if bench.on_gpu else "token"
        print(
            f"{streams:3} streams, one probed: {made['ratio']:.3f}x of the plain rate "
            f"({1e3 * made['plain']:.3f} ms per {unit} plain, {1e3 * made['probed']:.3f} probed)"
        )
        print(json.dumps(made))


if __name__ == "__main__":
    main()
