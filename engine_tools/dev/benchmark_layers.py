"""Times each layer in each installed framework, for prompts of several sizes.

    python engine_tools/dev/benchmark_layers.py --tokens 1 16 128 --plot layers.png
    engine dev benchmark_layers --family llama --hidden 512 --frameworks native torch

Weights are random, in float32. `block` and `ends` are measured in the same way for every framework,
through the model runner interface: `block` is the time that a second layer adds to a step, `ends`
is the rest of the time of a step with one layer. The other lines are measured by each framework
itself (`engine/tools/inspection.py`); a norm that is fused into the next matmul has
no line. Each time is the median of the faster half of the calls, in microseconds.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError
from engine.tools.inspection import frameworks, layer_times
from engine.weights.model import ModelSource
from engine.weights.random import random_model

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")
LAYERS = ("embed", "attn_norm", "attn", "mlp_norm", "mlp", "block", "norm", "head", "ends")
_NAMES = {"gpt2": "GPT2LMHeadModel"} | {
    name: f"{name.capitalize()}ForCausalLM" for name in FAMILIES[1:]
}
_NUM_LAYERS = 2
_HEAD_DIM = 64
Times = dict[tuple[str, int], dict[str, float]]  # (framework, number of tokens) -> layer -> seconds


def random_source(family: str, hidden: int, vocab: int, positions: int) -> ModelSource:
    """A model of the given family with two layers and random weights."""
    heads = max(1, hidden // _HEAD_DIM)
    common: dict[str, Any] = {
        "architectures": [_NAMES[family]],
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }
    if family == "gpt2":
        sizes = {"n_embd": hidden, "n_head": heads, "n_positions": positions}
        common |= sizes | {"n_layer": _NUM_LAYERS, "layer_norm_epsilon": 1e-5}
    else:
        common |= {
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": _NUM_LAYERS,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": positions,
            "rms_norm_eps": 1e-5,
        }
    return random_model(common, Path(f"random {family}"))


def measure(source: ModelSource, names: Sequence[str], sizes: Sequence[int], repeats: int) -> Times:
    return {
        (name, size): layer_times(name, source, size, repeats) for size in sizes for name in names
    }


def print_table(times: Times, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("layer", "tokens", box=None, pad_edge=False, title=title)
    names = list(dict.fromkeys(name for name, _ in times))
    sizes = list(dict.fromkeys(size for _, size in times))
    for name in names:
        table.add_column(f"{name} us", justify="right")
    for layer in LAYERS:
        for size in sizes:
            cells = [times[name, size].get(layer) for name in names]
            if any(cell is not None for cell in cells):
                texts = ("-" if cell is None else f"{1e6 * cell:,.1f}" for cell in cells)
                table.add_row(layer, f"{size:,}", *texts)
    Console().print(table)


def plot(times: Times, path: Path, title: str) -> None:
    """Plot one panel per layer that has times, with one line per framework."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for name, _ in times))
    sizes = list(dict.fromkeys(size for _, size in times))
    layers = [layer for layer in LAYERS if any(layer in found for found in times.values())]
    columns = min(3, len(layers))
    rows = -(-len(layers) // columns)
    figure = Figure(figsize=(4 * columns, 2.8 * rows), layout="constrained")
    for index, layer in enumerate(layers):
        axes = figure.add_subplot(rows, columns, index + 1)
        for number, name in enumerate(names):
            points = [
                (size, 1e6 * times[name, size][layer])
                for size in sizes
                if times[name, size].get(layer, 0) > 0
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name, color=f"C{number}")
        axes.set(title=layer, xscale="log", yscale="log", xlabel="tokens", ylabel="us")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    here, missing = frameworks()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--family", choices=FAMILIES, default="gpt2")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128], help="of a prompt")
    parser.add_argument("--frameworks", nargs="+", default=here, help="default: all that are here")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.frameworks) - set(here))
    if unknown:
        raise ConfigError(
            f"framework {unknown[0]} is not here: {missing.get(unknown[0], 'it is unknown')}"
        )
    positions = max(given.tokens) + 1
    source = random_source(given.family, given.hidden, given.vocab, positions)
    times = measure(source, given.frameworks, given.tokens, given.repeats)
    title = f"{given.family}, hidden size {given.hidden}"
    if given.json:
        rows = [
            {"framework": name, "tokens": size, "seconds": found}
            for (name, size), found in times.items()
        ]
        print(json.dumps({"title": title, "times": rows}, indent=2))
    else:
        print_table(times, title)
    if given.plot is not None:
        plot(times, given.plot, title)
        print(f"plot: {given.plot}")


if __name__ == "__main__":
    main()
