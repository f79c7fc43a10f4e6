"""Shows where a request's time and memory go: phases of the time to first token, time per
operation, bytes.

    python engine_tools/dev/profile_inference.py --model smollm2-135m-instruct --output profile/
    engine dev profile_inference --frameworks native torch

Writes a Chrome trace (chrome://tracing, ui.perfetto.dev) for each framework, and index.html, a
self-contained page. The measurements are those of `engine profile`. Without a model, random weights
are used.
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import psutil

from engine.core.errors import ConfigError
from engine.core.memory import MIB
from engine.core.store.model_store import resolve_model
from engine.ipc.options import EngineOptions
from engine.runners.entry import framework_entry
from engine.tools.inspection import frameworks
from engine.tools.profiling import Profile, profile_model
from engine.weights.model import ModelSource, open_model
from engine.worker.memory import plan_memory
from engine_tools.dev.benchmark_layers import random_source

_TOP = 15
_STYLE = """
body { font: 15px system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin-bottom: 2rem }
td, th { text-align: left; padding: .2rem .6rem; white-space: nowrap }
td.n { text-align: right; font-variant-numeric: tabular-nums }
.bar { background: #4a7bd0; height: .8rem; border-radius: 2px }
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes: what the engine planned for weights and KV cache, and how much the process
    has grown.
    """

    weights: int
    kv_cache: int
    grown: int


@dataclass(frozen=True, slots=True)
class Result:
    framework: str
    profile: Profile
    memory: Memory


def profile_framework(
    framework: str, source: ModelSource, prompt: tuple[int, ...], new_tokens: int, trace: Path
) -> Result:
    """Profile one framework and write its trace."""
    options = EngineOptions(
        model_path=str(source.path), framework=framework, device="cpu", dtype="float32"
    )
    engine = framework_entry(framework)
    device = engine.find_device("cpu", "float32")
    needs = engine.memory_needs(source, options, device)
    plan = plan_memory(source.config.max_position, options, device, needs)
    process = psutil.Process()
    before = process.memory_info().rss
    profile = profile_model(source, options, [prompt], new_tokens, None, trace)
    grown = max(0, process.memory_info().rss - before)
    return Result(framework, profile, Memory(plan.weight_bytes, plan.pool_bytes, grown))


def page(title: str, results: Sequence[Result]) -> str:
    """All results as one HTML document."""
    parts = [f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title>"]
    parts.append(f"<style>{_STYLE}</style><h1>{escape(title)}</h1>")
    for result in results:
        found, first = result.profile, result.profile.first_token
        rate = found.num_new_tokens / found.seconds
        parts.append(
            f"<h2>{escape(result.framework)}</h2><p>{found.num_prompt_tokens} tokens in, "
            f"{found.num_new_tokens} out on {escape(found.device)}, {escape(found.dtype)}: "
            f"{found.seconds:.3f} s, {rate:,.0f} new tokens/s"
        )
        steps = {
            "waiting": first.queue_s,
            "prompt": first.prefill_s,
            "drawing": first.first_sample_s,
        }
        parts.append(_bars("time to first token", {k: 1e3 * v for k, v in steps.items()}, "ms"))
        kernels = {f"{k.name} ({k.calls:,}x)": 1e3 * k.seconds for k in found.kernels[:_TOP]}
        parts.append(_bars("operations", kernels, "ms"))
        memory = {
            "weights, planned": result.memory.weights / MIB,
            "keys and values, planned": result.memory.kv_cache / MIB,
            "the process grew by": result.memory.grown / MIB,
        }
        parts.append(_bars("memory", memory, "MiB"))
    return "\n".join(parts)


def _bars(title: str, values: dict[str, float], unit: str) -> str:
    most = max(values.values(), default=0) or 1
    rows = "".join(
        f"<tr><td>{escape(name[:80])}<td class=n>{value:,.3f} {unit}"
        f'<td style="width:50%"><div class=bar style="width:{100 * value / most:.1f}%"></div>'
        for name, value in values.items()
    )
    return f"<h3>{escape(title)}</h3><table>{rows}</table>"


def _random_ids(source: ModelSource, count: int) -> tuple[int, ...]:
    ids = np.random.default_rng(0).integers(0, source.config.vocab_size, count)
    return tuple(ids.tolist())


def main(arguments: Sequence[str] | None = None) -> None:
    here, _ = frameworks()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a name, a file or a folder; default: random weights")
    parser.add_argument("--frameworks", nargs="+", choices=here, default=here)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16, help="new ones")
    parser.add_argument("--output", type=Path, help="a folder; default: a temporary one")
    given = parser.parse_args(arguments)

    folder = given.output or Path(tempfile.mkdtemp(prefix="profile-"))
    folder.mkdir(parents=True, exist_ok=True)
    source = (
        open_model(resolve_model(given.model))
        if given.model
        else random_source("gpt2", 256, 8192, given.prompt_tokens + given.tokens)
    )
    results = []
    with closing(source):
        prompt = _random_ids(source, given.prompt_tokens)
        for name in given.frameworks:
            trace = folder / f"{name}.trace.json"
            try:
                results.append(profile_framework(name, source, prompt, given.tokens, trace))
            except ConfigError as error:
                print(f"{name}: {error}")
                continue
            first = results[-1].profile.first_token
            print(f"{name}: first token after {1e3 * first.total_s:.2f} ms, trace {trace}")
    target = folder / "index.html"
    target.write_text(page(f"Profile of {source.path.name}", results), encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
