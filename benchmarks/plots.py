"""Plots how cost grows with load: measures, stores the points as JSON, draws them as PNG.

python -m benchmarks.plots                          # both plots, into docs/benchmarks
python -m benchmarks.plots --draw-only              # again from the stored JSON
python -m benchmarks.plots --only context --peers   # one of them, the engine alone
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_line
from benchmarks.peers import OURS
from benchmarks.process import exit_on_sigterm
from benchmarks.run import add_server_options, model_path, speaker
from benchmarks.sweeps import SWEEPS, sweep, write

FOLDER = Path(__file__).parent.parent / "docs" / "benchmarks"
SIZE_INCHES, DOTS_PER_INCH = (8.0, 4.6), 150
AXES = {
    "concurrency": ("requests at once", "output, tokens/s", "Throughput against concurrency"),
    "context": ("context, tokens", "time per token, ms", "Decode time against context"),
}
MARKERS = "os^Dv"


def main() -> None:
    options = _parser().parse_args()
    if not options.draw_only:
        _measure(options)
    for name in options.only:
        print(draw(json.loads((options.folder / f"{name}.json").read_text()), options.folder))


def draw(document: dict[str, Any], folder: Path) -> Path:
    """Draw one PNG beside its JSON."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import StrMethodFormatter

    x_label, y_label, title = AXES[document["sweep"]]
    figure, axes = plt.subplots(figsize=SIZE_INCHES, layout="constrained")
    for (name, server), marker in zip(document["servers"].items(), MARKERS, strict=False):
        xs = [point["x"] for point in server["points"]]
        ys = [point["y"] for point in server["points"]]
        width = 2.6 if name == OURS else 1.6
        axes.plot(xs, ys, marker=marker, linewidth=width, label=_legend(name, server["note"]))
    if document["sweep"] == "concurrency":  # points double, so use a log scale
        axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel(x_label, fontsize=12)
    axes.set_ylabel(y_label, fontsize=12)
    axes.set_title(f"{title}, {document['model']}", fontsize=13)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=11)
    figure.supxlabel(machine_line(document["machine"]), fontsize=8, color="0.4")
    path = folder / f"{document['sweep']}.png"
    figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)
    return path


def _legend(name: str, note: str) -> str:
    return f"{name} ({note})" if note else name


def _measure(options: argparse.Namespace) -> None:
    say = speaker()
    model = model_path(options.model)
    exit_on_sigterm()
    logs = Path(tempfile.mkdtemp(prefix="engine-bench-"))
    say(f"server output is in {logs}")
    for name in options.only:
        chosen = SWEEPS[name].upto(options.largest)
        document = asyncio.run(sweep(chosen, options, model, logs, say))
        say(f"points are in {write(document, options.folder)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_options(parser)
    parser.add_argument("--only", nargs="+", choices=list(SWEEPS), default=list(SWEEPS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--largest", type=int, default=10**9, help="leave out larger loads")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the JSON and PNG files")
    parser.add_argument("--draw-only", action="store_true", help="measure nothing")
    return parser


if __name__ == "__main__":
    main()
