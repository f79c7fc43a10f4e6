"""Runs the same requests in random schedules: a request's tokens must never depend on its batch.

Requests are batched, chunked, served from the cache, preempted, and repeated after a failed step,
in pools of any size. Half of the engines speculate, half of those with a draft model if there is
one. Half of all engines keep their steps even, and half have a cache tier. An engine may die, and
its requests continue in the next one. Each output is compared with that of the request running
alone. The result is one line of JSON.

    python -m tests.property.run_schedules --model toy --schedules 2000 --seed 1
    python -m tests.property.run_schedules --model native --schedules 100 --seed 1
    python -m tests.property.run_schedules --model tiny --schedules 10000 --seed 1
    python -m tests.property.run_schedules --model adapters --schedules 10000 --seed 1
"""

import argparse
import json
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from engine.core import faults
from engine.core.faults import Fault
from engine.core.interfaces.request import (
    Abort,
    AdapterRef,
    Control,
    GenerateRequest,
    SamplingParams,
)
from engine.runtime.groups.adapter_slots import AdapterSlots
from engine.runtime.model_runner import RunnerSpec
from engine.runtime.tiers.base import Tier
from engine.runtime.tiers.host import HostTier
from tests.property.schedule_engine import RETRIED, TIER_BYTES, Engine, Shape

TEXT = Path(__file__).parent.parent / "data" / "alice.txt"
NUM_REQUESTS = 24  # distinct requests
# What a schedule can run into. `adapter_returns` are rows of adapters after a preemption.
KINDS = (
    *("batches", "chunks", "hits", "preemptions", "failures", "drafted", "accepted"),
    *("by_model", "loads", "revivals", "mixes", "adapter_returns"),
)
HAPPENINGS = ["submit"] * 6 + ["turn"] * 8 + ["abort", "evict", "flush", "fail", "die"]
Output = dict[int, tuple[int, ...]]  # by choice


@dataclass(frozen=True)
class Model:
    """Requests, and how engines for them are made; `alone` has each request's output when run
    alone.
    """

    requests: list[GenerateRequest]
    new_engine: Callable[[random.Random, Tier | None], Engine]
    alone: list[Output]


def toy_model(rng: random.Random) -> Model:
    from tests.support.toy_engine.alone import generate_alone
    from tests.support.toy_engine.runner import VOCAB, ToyRunner

    prompts = [tuple(rng.randrange(3) for _ in range(rng.randint(1, 20))) for _ in range(8)]
    requests = [new_request(rng, rng.choice(prompts), index) for index in range(NUM_REQUESTS)]

    def new_engine(rng: random.Random, tier: Tier | None) -> Engine:
        size = rng.choice([1, 2, 16])
        least = -(-32 // size)  # enough for the longest request
        spec = RunnerSpec(size, 65, 5, 64, VOCAB, depth=rng.choice([0, 1]))
        return Engine(ToyRunner(spec), shape(rng, least, 64), tier)

    alone = [
        {
            choice: tuple(generate_alone(each.prompt, each.params, choice, frozenset(), 64)[0])
            for choice in range(each.params.n)
        }
        for each in requests
    ]
    return Model(requests, new_engine, alone)


def native_model(rng: random.Random) -> Model:
    """The default model on the native kernels; `alone` uses a separate engine with ample memory."""
    from engine.core.store.pull import pull
    from engine.core.text.tokenizer import Tokenizer
    from engine.native.execution.build import STORED, build_runner
    from engine.runtime.model_runner import RunnerConfig
    from engine.weights.model import open_model

    source = open_model(pull("smollm2-135m-instruct"))
    ids = Tokenizer.from_gguf(source.metadata).encode(TEXT.read_text(encoding="ascii")[:4000])
    config = RunnerConfig("cpu", STORED, 16, 65, 5, 256, None, max_batch_tokens=128)
    runner = build_runner(source, config)
    starts = [0, 0, 0, 200, 400]  # several share a prefix
    prompts = [tuple(ids[at : at + rng.randint(3, 60)]) for at in starts * 2]
    requests = [new_request(rng, rng.choice(prompts), index, 24) for index in range(NUM_REQUESTS)]
    alone = [run_alone(Engine(runner, Shape(64, 5, 128)), each) for each in requests]
    return Model(requests, lambda rng, tier: Engine(runner, shape(rng, 6, 40), tier), alone)


def tiny_model(rng: random.Random) -> Model:
    """A tiny Llama with random weights on the native kernels."""
    from engine.native.execution.build import build_runner
    from engine.runtime.model_runner import RunnerConfig
    from engine.weights.model import open_model
    from tests.parity import tiny_models

    with tempfile.TemporaryDirectory() as folder:
        _, path = tiny_models.save("llama", Path(folder))
        config = RunnerConfig("cpu", "float32", 16, 65, 5, 96, 1, max_batch_tokens=128)
        source = open_model(path)
        runner = build_runner(source, config)
        # The draft model has fewer layers, fewer slots than most engines, and a small cache.
        small = replace(config, num_blocks=12, max_slots=3)
        fewer = replace(source.config, num_layers=source.config.num_layers - 1)
        draft = build_runner(replace(source, config=fewer), small)
    shared = tiny_models.text(24, seed=90)
    prompts = [tuple(shared[: rng.randint(1, 24)]) for _ in range(4)]
    prompts += [tuple(tiny_models.text(rng.randint(1, 40), seed)) for seed in range(4)]
    requests = [new_request(rng, rng.choice(prompts), index, 24) for index in range(NUM_REQUESTS)]
    alone = [run_alone(Engine(runner, Shape(64, 5, 128)), each) for each in requests]
    return Model(requests, lambda rng, tier: Engine(runner, shape(rng, 6, 40), tier, draft), alone)


def adapters_model(rng: random.Random) -> Model:
    """As `tiny_model`, with three LoRA adapters in two places. Requests of all of them have the
    same prompts. Outputs are long for the pools, so sequences of adapters are preempted too.
    """
    from engine.adapters.reading import open_adapter
    from engine.native.execution.build import build_runner
    from engine.runtime.model_runner import RunnerConfig
    from engine.weights.model import open_model
    from tests.parity import tiny_models
    from tests.support.files.lora_files import InlinePlaces, peft_folder

    shapes = {
        "model.layers.0.self_attn.q_proj": (48, 48),
        "model.layers.0.self_attn.v_proj": (16, 48),
        "model.layers.1.mlp.down_proj": (48, 80),
    }
    with tempfile.TemporaryDirectory() as folder:
        _, path = tiny_models.save("llama", Path(folder))
        source = open_model(path)
        config = RunnerConfig("cpu", "float32", 16, 65, 5, 96, 1, max_batch_tokens=128)
        runner = build_runner(source, config)
        made = {
            str(rank): open_adapter(
                peft_folder(Path(folder) / str(rank), shapes, rank=rank, seed=rank, std=0.4),
                source.config,
            )
            for rank in (2, 3, 5)
        }
    refs = [None, *(AdapterRef(each.key, name) for name, each in made.items())]

    def places() -> AdapterSlots:
        return InlinePlaces(runner, lambda path: made[str(path)], 2, 1)

    prompts = [tuple(tiny_models.text(24, seed=90)[: rng.randint(1, 24)]) for _ in range(4)]
    requests = [
        msgspec.structs.replace(
            new_request(rng, rng.choice(prompts), index, 60), adapter=rng.choice(refs)
        )
        for index in range(NUM_REQUESTS)
    ]
    new = lambda shape, tier=None: Engine(runner, shape, tier, places=places)  # noqa: E731
    alone = [run_alone(new(Shape(64, 5, 128)), each) for each in requests]
    return Model(requests, lambda rng, tier: new(shape(rng, 6, 8), tier), alone)


def new_request(
    rng: random.Random, prompt: tuple[int, ...], index: int, most_tokens: int = 10
) -> GenerateRequest:
    params = SamplingParams(
        n=rng.choice([1, 1, 2]),
        max_tokens=rng.randint(1, most_tokens),
        temperature=rng.choice([0.0, 0.0, 1.0]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        seed=index,
    )
    return GenerateRequest(
        request_id=str(index), prompt=prompt, params=params, salt=rng.choice(["", "", "other"])
    )


def shape(rng: random.Random, least_blocks: int, most_blocks: int) -> Shape:
    return Shape(
        num_blocks=rng.randint(least_blocks, rng.choice([least_blocks + 2, most_blocks])),
        max_slots=rng.choice([1, 3, 5, 5]),
        budget=rng.choice([1, 5, 16, 128]),
        sharing=rng.random() < 0.8,
        speculates=rng.random() < 0.5,
        has_draft_model=rng.random() < 0.5,
        paces=rng.random() < 0.5,
    )


def run_alone(engine: Engine, request: GenerateRequest) -> Output:
    engine.channel.inbox.append(request)
    engine.finish()
    return {choice: tuple(tokens) for (_, choice), tokens in engine.tokens.items()}


def run_schedule(model: Model, rng: random.Random, seen: Counter[str]) -> int:
    """Number of choices whose tokens differ from those of the request alone."""
    tier = HostTier(TIER_BYTES, "lru", None) if rng.random() < 0.5 else None
    engine = model.new_engine(rng, tier)
    asked: dict[str, int] = {}
    sent: dict[str, GenerateRequest] = {}
    left = rng.randint(2, 10)
    while left or rng.random() < 0.9:
        happening = rng.choice(HAPPENINGS)
        if happening == "submit" and left:
            left -= 1
            index = rng.randrange(len(model.requests))
            request_id = f"r{len(asked)}"
            asked[request_id] = index
            sent[request_id] = msgspec.structs.replace(
                model.requests[index],
                request_id=request_id,
                priority=rng.choice([0, 0, 1]),
                expected=nearly(model.alone[index][0], rng),
            )
            engine.channel.inbox.append(sent[request_id])
        elif happening == "abort" and asked:
            engine.channel.inbox.append(Abort(rng.choice(sorted(asked))))
        elif happening == "evict":
            engine.kv.radix.evict(rng.randint(1, 8))
        elif happening == "flush":
            engine.channel.inbox.append(Control(1, "flush_cache"))
        elif happening == "fail":
            with faults.planned(Fault(rng.choice(RETRIED), at=rng.randint(1, 3))) as plan:
                engine.turn()
            seen["failures"] += plan.num_strikes
        elif happening == "die":
            seen.update(engine.counts())
            dead, engine = engine, model.new_engine(rng, tier)
            engine.take_over(dead, sent)
        engine.turn()
    engine.finish()
    seen.update(engine.counts())
    return _count_mismatches(model, engine, asked, seen)


def nearly(output: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """An output that a client may expect: the right one, or one with a few wrong tokens."""
    wrong = rng.choice([0.0, 0.1, 1.0])
    return tuple(rng.randrange(20) if rng.random() < wrong else token for token in output)


def _count_mismatches(
    model: Model, engine: Engine, asked: dict[str, int], seen: Counter[str]
) -> int:
    mismatches = 0
    for request_id, index in asked.items():
        for choice, expected in model.alone[index].items():
            tokens = tuple(engine.tokens[request_id, choice])
            if engine.endings[request_id, choice] == "abort":
                mismatches += tokens != expected[: len(tokens)]
            else:
                mismatches += tokens != expected
                seen["compared"] += 1
    return mismatches


def run(name: str, num_schedules: int, seed: int) -> dict:
    model = MODELS[name](random.Random(seed))
    began, seen, failing, mismatches = time.monotonic(), Counter(), None, 0
    for number in range(num_schedules):
        found = run_schedule(model, random.Random(f"{seed}-{number}"), seen)
        failing = number if found and failing is None else failing
        mismatches += found
    return {
        "model": name,
        "schedules": num_schedules,
        "mismatches": mismatches,
        "compared": seen["compared"],
        **{key: seen[key] for key in KINDS},
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
        "first_failing": failing,
    }


MODELS = {
    "toy": toy_model,
    "native": native_model,
    "tiny": tiny_model,
    "adapters": adapters_model,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="toy")
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # injected faults are logged like real ones
    result = run(arguments.model, arguments.schedules, arguments.seed)
    print(json.dumps(result))
    raise SystemExit(bool(result["mismatches"]))


if __name__ == "__main__":
    main()
