"""Measures what speculation saves on a GPU, by lookup and with a draft model.

    python -m benchmarks.gpu.speculation --model llama-8b --draft llama-1b

Random weights repeat no text, so some weights are set by hand: layers change almost nothing, and
the row of the LM head for a token is the embedding of the token before it in a fixed chain. So the
model continues the chain, at the cost of any model of its shape. Its logits have no near-ties, so
all modes must give the same tokens. The draft model has a chain of its own, of which 80 % is the
same.

"copy": the prompt has the text that the model writes. "edit": one of sixteen of its tokens differs.
"chat": nothing of the output is in the prompt, and nothing repeats. Modes run in alternating
rounds, and the figures are medians of the decode time, as ratios to the time without speculation.
"""

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.features.speculation import Memory
from benchmarks.gpu.workloads import SHAPES, Shape
from engine.core.interfaces.request import Deltas, GenerateRequest, SamplingParams
from engine.ipc.options import EngineOptions
from engine.runners.entry import framework_entry
from engine.runtime.dummy_batch import warm_up
from engine.runtime.loop import EngineLoop
from engine.runtime.model_runner import Warmable
from engine.runtime.speculation.draft_model import DraftModel
from engine.runtime.speculation.drafts import Speculation
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.model import ModelSource
from engine.weights.quants import dequantize
from engine.weights.random import STORED, Normal, RandomWeight, random_model
from engine.weights.weight import Weight
from engine.worker.loading import load_runner
from engine.worker.main import build_loop, planned

QUIET = 1e-4  # factor of the matrices with which layers write to the residual stream
AGREEMENT = 0.8  # share of the tokens after which the draft model has the right one
EDITED = 16  # one of so many tokens is edited
LENGTHS = {"copy": (513, 512), "edit": (513, 512), "chat": (128, 256)}  # of prompt and output
DRAFT_BLOCKS, DRAFT_SLOTS = 1024, 16


@dataclass(frozen=True, slots=True)
class QuietWeight(RandomWeight):
    @property
    def values(self) -> Normal:
        usual: Normal = RandomWeight.values.__get__(self)
        return replace(usual, std=QUIET * usual.std)


class Chain:
    """An order of all tokens. `after[t]` is the token that follows token t."""

    def __init__(self, shape: Shape, seed: int) -> None:
        ids = np.arange(shape.first_id, shape.last_id)
        self.order = np.random.default_rng(seed).permutation(ids)
        self.after = np.arange(shape.config["vocab_size"])
        self.after[self.order] = np.roll(self.order, -1)

    def nearly(self, seed: int) -> NDArray[np.int64]:
        """As `after`, but a share of the tokens is followed by others."""
        rng = np.random.default_rng(seed)
        changed = rng.permutation(self.order)[: int((1 - AGREEMENT) * len(self.order))]
        after = self.after.copy()
        after[changed] = np.roll(after[changed], 1)
        return after

    def part(self, start: int, length: int) -> list[int]:
        """Tokens of the chain, from place `start` on."""
        return np.take(self.order, range(start, start + length), mode="wrap").tolist()


def chained_model(config: Mapping[str, Any], path: Path, after: NDArray[np.int64]) -> ModelSource:
    """A model that continues each token t with `after[t]`."""
    source = random_model({**config, "tie_word_embeddings": False}, path)
    weights = dict(source.weights)
    for name, weight in weights.items():
        if name.endswith(("attn.o.weight", "mlp.down.weight")):
            weights[name] = QuietWeight(weight.spec, weight.tensors)
    rng = np.random.default_rng(1)
    shape = weights["embed.weight"].spec.shape
    signs = rng.integers(0, 2, shape, np.uint16) << 15
    embedding = signs | np.uint16(0x3C00)  # plus or minus 1/128 in bfloat16
    head = np.empty_like(embedding)
    head[after] = embedding
    for name, values in (("embed.weight", embedding), ("head.weight", head)):
        weights[name] = _stored(weights[name], values)
    return replace(source, weights=weights)


def _stored(weight: Weight, values: NDArray[np.uint16]) -> Weight:
    tensor = LazyTensor(
        name=weight.spec.name,
        shape=weight.spec.shape,
        dtype=STORED,
        nbytes=2 * prod(weight.spec.shape),
        _view=lambda: values.reshape(-1).view(np.uint8),
        _dequantize=partial(dequantize, STORED),
    )
    return Weight(weight.spec, (tensor,))


class Bench:
    """A loaded model and its draft model, and how engines with and without speculation are made."""

    def __init__(self, model: str, draft: str, device: str) -> None:
        self.shape = SHAPES[model]
        self.chain = Chain(self.shape, seed=0)
        source = chained_model(self.shape.config, Path(model), self.chain.after)
        self._options = planned(
            EngineOptions(
                model_path=model,
                framework="torch",
                device=device,
                cache_enabled=False,
                gpu_memory_utilization=0.5,
            )
        )
        self._runner, config, self._plan = load_runner(source, self._options)
        small = chained_model(SHAPES[draft].config, Path(draft), self.chain.nearly(seed=2))
        own = replace(config, num_blocks=DRAFT_BLOCKS, max_slots=DRAFT_SLOTS)
        runner = framework_entry("torch").build_runner(small, own)
        self._draft = DraftModel(runner, config.max_batch_tokens)
        self._draft.warm()
        if isinstance(self._runner, Warmable):
            self._runner.warm()
        warm_up(self._runner)

    def loop(self, mode: str, channel: Memory) -> EngineLoop:
        setting = "off" if mode == "off" else "on"
        options = msgspec.structs.replace(self._options, speculation=setting)
        draft = self._draft if mode == "draft model" else None
        return build_loop(self._runner, options, self._plan.bytes_per_token, channel, draft=draft)

    def requests(self, kind: str, streams: int, round_number: int) -> list[GenerateRequest]:
        """Requests with texts of their own: each continues another part of the chain."""
        num_prompt, num_new = (max(8, each // self.shape.divisor) for each in LENGTHS[kind])
        rng = random.Random(round_number)
        found = []
        for number in range(streams):
            start = rng.randrange(len(self.chain.order))
            prompt = self.chain.part(start, num_prompt - 1)
            if kind == "chat":
                prompt = [rng.choice(self.chain.order.tolist()) for _ in prompt]
            if kind == "edit":
                for place in range(EDITED // 2, len(prompt), EDITED):
                    prompt[place] = int(self.chain.order[start - 1 - place])
            ids = (*prompt, int(self.chain.order[start]))
            params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
            found.append(GenerateRequest(request_id=str(number), prompt=ids, params=params))
        return found

    def run(
        self, loop: EngineLoop, channel: Memory, requests: Sequence[GenerateRequest]
    ) -> tuple[float, dict[str, list[int]]]:
        """Seconds from the first token of the last prompt to the end, and the tokens."""
        channel.inbox.extend(requests)
        outputs: dict[str, list[int]] = {}
        began_at = 0.0
        while len(outputs) < len(requests) or loop.scheduler.has_work:
            loop.turn(0.0)
            for message in channel.outbox:
                for delta in message.deltas if isinstance(message, Deltas) else ():
                    outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            channel.outbox.clear()
            if not began_at and len(outputs) == len(requests):
                began_at = time.monotonic()
        seconds = time.monotonic() - began_at
        loop.turn(0.0)
        return seconds, outputs


def compare(bench: Bench, kind: str, streams: int, modes: Sequence[str], rounds: int) -> dict:
    """The speed of each mode in units of that without speculation."""
    channels = {mode: Memory() for mode in modes}
    loops = {mode: bench.loop(mode, channel) for mode, channel in channels.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    same = True
    for number in range(rounds + 1):
        requests, expected = bench.requests(kind, streams, number), None
        for mode in modes:
            took, outputs = bench.run(loops[mode], channels[mode], requests)
            expected = expected or outputs
            same = same and outputs == expected
            if number:  # the first round also pays for kernels that were not warm
                seconds[mode].append(took)
    stats = {mode: loops[mode].stats() for mode in modes}
    tokens = streams * requests[0].params.max_tokens
    return {
        "text": kind,
        "streams": streams,
        "same_tokens": same,
        "tokens_per_s": {mode: round(tokens / median(seconds[mode]), 1) for mode in modes},
        "speedup": {
            mode: round(median(map(_ratio, seconds["off"], seconds[mode])), 3) for mode in modes
        },
        "accepted": {
            mode: f"{each.num_accepted_tokens} of {each.num_drafted_tokens}, by model "
            f"{each.num_model_accepted_tokens} of {each.num_model_drafted_tokens}"
            for mode, each in stats.items()
        },
        "draft_model": known(loops["draft model"]) if "draft model" in loops else {},
    }


def known(loop: EngineLoop) -> dict[str, float]:
    """What the engine has learned about its draft model, at the end of the rounds."""
    speculation = loop.scheduler.find(Speculation)
    assert speculation is not None and speculation.model is not None
    drafts, budget = speculation.model, loop._budget
    return {
        "chance": round(drafts._shared.chance, 3),
        "saved_ms": round(1e3 * drafts._saved_s, 2),
        "guess_ms": round(1e3 * drafts._model.token_s(1), 3),
        "step_ms": round(1e3 * (budget.step_s(1, 1) or 0.0), 3),
        "price": round(budget.price(1), 3),
        "price_of_8": round(budget.price(8), 3),
    }


def _ratio(one: float, other: float) -> float:
    return one / other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--draft", choices=SHAPES, default="llama-1b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=LENGTHS, nargs="+", default=list(LENGTHS))
    parser.add_argument("--output", type=Path, help="append the results to this file")
    given = parser.parse_args()
    bench = Bench(given.model, given.draft, given.device)
    modes = ("off", "lookup", "draft model")
    for kind, streams in (("copy", 1), ("edit", 1), ("chat", 1), ("chat", 8), ("chat", 64)):
        if kind not in given.only:
            continue
        line = json.dumps(compare(bench, kind, streams, modes, given.rounds))
        print(line, flush=True)
        if given.output:
            with given.output.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
