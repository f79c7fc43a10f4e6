"""Compares steady decode of our frameworks and Transformers, alternating in one process.

    python -m benchmarks.kernels.frameworks FOLDER --backends jax torch transformers --concurrency 8

FOLDER is a Hugging Face checkpoint, or the name of a shape of `gpu/workloads.py`, whose weights are
random and which Transformers does not run. Rates are measured while all requests run: from the last
request's first token to the first request's last token. Other load and clock changes affect the
rates, so compare the ratios within one run, not rates of different runs.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.engine import shape_source
from benchmarks.gpu.workloads import SHAPES
from engine.core.interfaces.request import GenerateRequest, SamplingParams
from engine.ipc.options import EngineOptions
from engine.tools.profiling import DrivenEngine, Run
from engine.weights.model import ModelSource, open_model

BASELINE = "transformers"
# Prompts, number of new tokens -> new tokens per second, of all requests together.
Measure = Callable[[Sequence[Sequence[int]], int], float]


def source_of(model: str) -> ModelSource:
    return shape_source(model) if model in SHAPES else open_model(Path(model))


def our_engine(source: ModelSource, framework: str, args: argparse.Namespace) -> Measure:
    options = EngineOptions(
        model_path=str(source.path),
        framework=framework,
        device=args.device,
        dtype=args.dtype,
        max_slots=max(args.concurrency, 8),
        max_seq_len=args.prompt_tokens + args.tokens + 16,
    )
    engine = DrivenEngine(source, options)

    def measure(prompts: Sequence[Sequence[int]], num_new: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        return _steady_rate(
            engine.generate(
                [
                    GenerateRequest(request_id=str(i), prompt=tuple(prompt), params=params)
                    for i, prompt in enumerate(prompts)
                ]
            )
        )

    return measure


def _steady_rate(run: Run) -> float:
    firsts: dict[str, float] = {}
    lasts: dict[str, float] = {}
    for at, delta in run.answers:
        if delta.token_ids:
            firsts.setdefault(delta.request_id, at)
            lasts[delta.request_id] = at
    began, ended = max(firsts.values()), min(lasts.values())
    assert began < ended, "the requests never ran all together: ask for more tokens"
    return sum(len(delta.token_ids) for at, delta in run.answers if began < at <= ended) / (
        ended - began
    )


def transformers_engine(args: argparse.Namespace) -> Measure:
    # Set before PyTorch is imported: spinning threads starve other processes on the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model: Any = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()

    @torch.inference_mode()
    def measure(prompts: Sequence[Sequence[int]], num_new: int) -> float:
        cache = DynamicCache(config=model.config)
        ids = torch.tensor(prompts)
        ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        began = time.monotonic()
        for _ in range(num_new - 1):
            ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        return len(prompts) * (num_new - 1) / (time.monotonic() - began)

    return measure


def main() -> None:
    args = _arguments()
    source = source_of(args.model)
    engines = {
        name: transformers_engine(args) if name == BASELINE else our_engine(source, name, args)
        for name in args.backends
    }
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(args.rounds + 1):
        drawn = random.Random(turn)
        prompts = [
            drawn.choices(range(100, 20_000), k=args.prompt_tokens) for _ in range(args.concurrency)
        ]
        for name, measure in engines.items():
            rate = measure(prompts, args.tokens)
            if turn:  # the first round compiles and warms up
                rates[name].append(rate)
    _report(rates, args)


def _report(rates: dict[str, list[float]], args: argparse.Namespace) -> None:
    base = args.backends[-1]
    found = {
        name: {
            "tokens_per_s": round(median(values), 1),
            f"of_{base}": round(median(a / b for a, b in zip(values, rates[base], strict=True)), 2),
        }
        for name, values in rates.items()
    }
    if args.json:
        print(json.dumps(found))
        return
    print(f"steady decode, {args.concurrency} at once, {args.dtype}, {args.rounds} rounds in turns")
    for name, figures in found.items():
        print(f"{name:14}" + "  ".join(f"{key} {value}" for key, value in figures.items()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", help="a Hugging Face folder, or a shape's name")
    parser.add_argument("--backends", nargs="+", default=["jax", "torch", BASELINE])
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
