"""Runs all GPU workloads and compares them with vLLM and the card's roofline, in one table.

    python -m benchmarks.gpu.run --model llama-1b --output gpu-1b.json

The weights are random, with the model's shape. Each workload runs several times, with other token
ids each time, and the best run counts; "start" is the time from process start to the first token.
vLLM's recorded figures are from one H200. If vLLM is installed, it is measured first. With
--quantization or --kv-dtype, it also prints how far log-probabilities are from those in bfloat16.
"""

import argparse
import gc
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu import vllm
from benchmarks.gpu.correctness import Drift, prompt_drift, scores
from benchmarks.gpu.engine import BenchEngine, shape_source
from benchmarks.gpu.roof import H200, quantized, roof_seconds
from benchmarks.gpu.start import measure_starts
from benchmarks.gpu.workloads import FIGURES, SHAPES, START_FIGURES, workloads
from benchmarks.machine import machine, machine_line
from engine.core.sandbox.processes import keep_all
from engine.ipc.options import EngineOptions
from engine.tools.profiling import Run

START = "start"
WIDTH = 160  # of the table, even without a terminal


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. A ratio above 1 means that this engine is better."""

    name: str
    label: str
    unit: str
    ours: float
    vllm: float | None  # recorded
    vllm_here: float | None
    bar: float | None
    higher_is_better: bool
    roof_share: float | None = None  # 1: at the roofline of this GPU
    host_ms: float | None = None  # per step
    steps: int | None = None

    @property
    def ratio(self) -> float | None:
        return self._better_by(self.vllm_here or self.vllm)

    @property
    def meets_bar(self) -> bool | None:
        by = self._better_by(self.bar)
        return None if by is None else by >= 1

    def _better_by(self, other: float | None) -> float | None:
        if other is None:
            return None
        return self.ours / other if self.higher_is_better else other / self.ours


def main() -> None:
    given = _arguments()
    names = [name for name in given.workloads if name != START]
    options = engine_options(given)
    console = Console(width=WIDTH)
    facts = {**machine(), **device_facts(options["device"])}
    console.print(machine_line(facts), facts["device"], sep="; ", highlight=False)
    here = {}
    if given.vllm and vllm.is_installed():
        here = vllm.measure(given.model, names, given.repeats)
    starts = measure_starts(given.model, options) if START in given.workloads else {}
    runs = measure(given.model, names, given.repeats, options)
    rows = [workload_row(options, name, runs[name], here.get(name)) for name in names]
    rows += [_start_row(given.model, name, found) for name, found in starts.items()]
    title = f"{judged_as(options)}, KV cache {given.kv_dtype}"
    console.print(results_table(title if is_quantized(options) else given.model, rows))
    drift = accuracy(options) if is_quantized(options) else None
    if drift is not None:
        console.print(f"log-probabilities off bfloat16, nats: {drift}", highlight=False)
    if given.output:
        report = {
            "machine": facts,
            "model": given.model,
            "options": options,
            "rows": [row_facts(row) for row in rows],
            "runs": {name: [run_facts(run) for run in found] for name, found in runs.items()},
            "starts": starts,
            "drift": None if drift is None else asdict(drift),
        }
        given.output.write_text(json.dumps(report, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everything = [*FIGURES, START]
    parser.add_argument("--model", choices=SHAPES, default="llama-1b")
    parser.add_argument("--workloads", nargs="+", choices=everything, default=everything)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=("auto", "fp8", "int8"), default="auto")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--attention", default="auto", help="name of an attention backend")
    parser.add_argument("--max-slots", type=int, default=256)
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--no-vllm", dest="vllm", action="store_false")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON with every repeat")
    return parser.parse_args()


def engine_options(given: argparse.Namespace) -> dict[str, Any]:
    return {
        "model_path": given.model,
        "framework": "torch",
        "device": given.device,
        "dtype": given.dtype,
        "quantization": given.quantization,
        "kv_dtype": given.kv_dtype,
        "attention": given.attention,
        "max_slots": given.max_slots,
        "max_batch_tokens": given.max_batch_tokens,
    }


def is_quantized(options: dict[str, Any]) -> bool:
    return (options["quantization"], options["kv_dtype"]) != ("auto", "auto")


def judged_as(options: dict[str, Any]) -> str:
    """The name under which figures of the model are recorded."""
    kind = options["quantization"]
    return options["model_path"] if kind == "auto" else f"{options['model_path']} {kind}"


def accuracy(options: dict[str, Any]) -> Drift:
    """How far the log-probabilities of prompt tokens are from those of the plain model."""
    model, device = options["model_path"], options["device"]
    changes = {name: options[name] for name in ("quantization", "kv_dtype")}
    plain = scores(model, device, "bfloat16", "auto")
    return prompt_drift(plain, scores(model, device, "bfloat16", "auto", **changes))


def device_facts(device: str) -> dict[str, Any]:
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return {"device": "no GPU in use", "torch": torch.__version__}
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__}


def measure(
    model: str, names: list[str], repeats: int, options: dict[str, Any]
) -> dict[str, list[Run]]:
    """All repeats of every workload, on one engine."""
    if not names:
        return {}
    engine = BenchEngine(model, EngineOptions(**options))
    gc.collect()
    keep_all()  # as a served engine does
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for seed in range(repeats):
        requested = workloads(SHAPES[model], seed)
        for name in names:
            runs[name].append(engine.run(requested[name]))
    engine.close()
    return runs


def workload_row(
    options: dict[str, Any], name: str, runs: list[Run], here: list[float] | None
) -> Row:
    figure, model, key = FIGURES[name], options["model_path"], judged_as(options)
    value, seed = best_value(model, name, [run.seconds for run in runs])
    best, workload = runs[seed], workloads(SHAPES[model], seed)[name]
    card = quantized(H200, options["quantization"], options["kv_dtype"])
    roof_s = roof_seconds(shape_source(model).config, workload, card)
    return Row(
        name,
        figure.label,
        figure.unit,
        value,
        figure.vllm.get(key),
        best_value(model, name, here)[0] if here else None,
        figure.bar.get(key),
        figure.higher_is_better,
        roof_share=roof_s / best.seconds,
        host_ms=1e3 * best.host_s / len(best.steps),
        steps=len(best.steps),
    )


def best_value(model: str, name: str, seconds: list[float]) -> tuple[float, int]:
    """The best figure over the repeats, and its seed. Each repeat has its own prompt lengths."""
    figure = FIGURES[name]
    values = [
        figure.value(workloads(SHAPES[model], seed)[name], took)
        for seed, took in enumerate(seconds)
    ]
    best = max(values) if figure.higher_is_better else min(values)
    return best, values.index(best)


def _start_row(model: str, name: str, found: dict[str, float]) -> Row:
    figure = START_FIGURES[name]
    return Row(
        f"{START} {name}",
        figure.label,
        figure.unit,
        found["seconds"],
        figure.vllm.get(model),
        None,
        figure.bar.get(model),
        figure.higher_is_better,
    )


def results_table(model: str, rows: list[Row]) -> Table:
    table = Table("workload", title=f"{model}, random weights", title_justify="left", box=None)
    titles = ("ours", "vLLM", "vLLM here", "better by", "of roof", "host ms/step", "bar", "")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.name}: {row.label}, {row.unit}",
            _number(row.ours),
            _number(row.vllm),
            _number(row.vllm_here),
            "-" if row.ratio is None else f"{row.ratio:.2f}x",
            "-" if row.roof_share is None else f"{row.roof_share:.0%}",
            "-" if row.host_ms is None else f"{row.host_ms:.3f}",
            _number(row.bar),
            {True: "met", False: "missed", None: ""}[row.meets_bar],
        )
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def row_facts(row: Row) -> dict[str, Any]:
    facts = {name: getattr(row, name) for name in Row.__dataclass_fields__}
    return {**facts, "ratio": row.ratio, "meets_bar": row.meets_bar}


def run_facts(run: Run) -> dict[str, float]:
    return {
        "seconds": run.seconds,
        "first_token_s": run.first_token_s,
        "steps": len(run.steps),
        "host_s": run.host_s,
        "launch_s": run.launch_s,
        "wait_s": run.wait_s,
    }


if __name__ == "__main__":
    main()
