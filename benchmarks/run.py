"""Starts the engine and its peers, asks all of them the same things in turn, prints one table.

    python -m benchmarks.run                       # the default model, every peer that can run here
    python -m benchmarks.run --rounds 1 --concurrency 1 8 --scenarios conc --peers

Servers are alive side by side and each scenario goes round them before the next one starts, so a
disturbance of the machine meets all of them; rounds give the median and the spread. Every round has
its own prompts. Compare figures of one run only.
"""

import argparse
import asyncio
import json
import os
import shlex
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import machine, machine_line
from benchmarks.peers import PEERS, Setup, Unavailable, install, ours, peers_cache
from benchmarks.process import RunningServer, ServerProcess, ServerSpec, exit_on_sigterm
from benchmarks.report import Rounds, comparison_table
from benchmarks.scenarios import SCENARIOS, Scenario, measure
from engine.core.errors import EngineError
from engine.core.utils.catalogue import DEFAULT_MODEL
from engine.core.utils.model_store import resolve_model
from engine.core.utils.pull import pull

MIN_PREFIX_RATIO = 5.0  # how much sooner the first token of a shared prefix must come

Results = dict[str, dict[str, Rounds]]


def main() -> None:
    options = _parser().parse_args()
    console = Console(stderr=True)
    try:
        model = _model_path(options.model)
    except EngineError as error:
        sys.exit(f"error: {error}")
    facts = machine()
    console.print(machine_line(facts), highlight=False)
    specs = _server_specs(options, model, console)
    scenarios = _scenarios(options)
    exit_on_sigterm()
    logs = Path(tempfile.mkdtemp(prefix="engine-bench-"))
    console.print(f"server output is in {logs}", highlight=False)
    results = asyncio.run(compare(specs, scenarios, options.rounds, logs, console))
    Console().print(comparison_table(results))
    print(machine_line(facts))
    for spec in specs:
        if spec.note:
            print(f"{spec.name}: {spec.note}")
    if options.output is not None:
        document = {"machine": facts, "model": str(model), "results": results}
        options.output.write_text(json.dumps(document, indent=2))
    sys.exit(0 if all(judge(results, console)) else 1)


async def compare(
    specs: list[ServerSpec],
    scenarios: list[Scenario],
    rounds: int,
    logs: Path,
    console: Console,
) -> Results:
    results: Results = {spec.name: {} for spec in specs}
    processes = {spec.name: ServerProcess(spec, logs / f"{spec.name}.log") for spec in specs}
    try:
        running = await _cold_starts(processes, rounds, results, console)
        for number in range(rounds):
            for scenario in scenarios:
                for name, server in running.items():
                    console.print(f"round {number + 1}: {scenario.label} on {name}")
                    figures = await _ask(scenario, server, f"round-{number}")
                    results[name].setdefault(scenario.label, []).append(figures)
                    if figures["failed"]:
                        console.print(f"  {figures['failed']} failed: {figures['first_error']}")
    finally:
        for process in processes.values():
            process.stop()
    return results


async def _cold_starts(
    processes: dict[str, ServerProcess], rounds: int, results: Results, console: Console
) -> dict[str, RunningServer]:
    """Start every server once per round, in turn; those of the last round stay up."""
    running: dict[str, RunningServer] = {}
    for number in range(rounds):
        for name, process in processes.items():
            console.print(f"round {number + 1}: start of {name}")
            running[name] = await process.start()
            figures = {
                "ready_s": running[name].ready_s,
                "first_completion_s": running[name].first_completion_s,
            }
            results[name].setdefault("cold", []).append(figures)
            if number < rounds - 1:
                process.stop()
    return running


async def _ask(scenario: Scenario, server: RunningServer, seed: str) -> dict[str, Any]:
    return await measure(scenario, server.target, seed=seed, repeat=1, warmup=1, pid=server.pid)


def judge(results: Results, console: Console) -> list[bool]:
    """Whether no request failed, and the engine's prefix cache did what it is for."""
    ours_name = next(iter(results))
    verdicts = []
    for label, rounds in results[ours_name].items():
        failed = sum(figures.get("failed", 0) for figures in rounds)
        if failed:
            console.print(f"{label}: {failed} requests to {ours_name} failed")
        verdicts.append(failed == 0)
    for figures in results[ours_name].get("prefix", []):
        found = figures["cold_over_later"]
        good = found is not None and found["median"] >= MIN_PREFIX_RATIO
        if not good:
            console.print(f"shared prefix: cold / later is {found}, below {MIN_PREFIX_RATIO}")
        verdicts.append(good)
    return verdicts


def _server_specs(options: argparse.Namespace, model: Path, console: Console) -> list[ServerSpec]:
    cache = peers_cache()

    def setup() -> Setup:
        return Setup(model, cache, options.threads, free_port())

    specs = [ours(setup(), tuple(shlex.split(options.serve_args)))]
    for name in options.peers:
        if options.install_peers:
            install(name, cache)
        try:
            specs.append(PEERS[name](setup()))
        except Unavailable as reason:
            console.print(str(reason), highlight=False, markup=False)
    return specs


def _scenarios(options: argparse.Namespace) -> list[Scenario]:
    chosen = []
    for name in options.scenarios:
        if name == "conc":
            chosen += [replace(SCENARIOS["conc"], concurrency=each) for each in options.concurrency]
        else:
            chosen.append(SCENARIOS[name])
    return chosen


def _model_path(name: str) -> Path:
    return pull(name) if name == DEFAULT_MODEL else resolve_model(name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file or a pulled model")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--scenarios", nargs="+", choices=list(SCENARIOS), default=["conc", "prefix", "chat"]
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--serve-args", default="", help="more arguments for `engine serve`")
    parser.add_argument("--output", type=Path, help="write every figure to this JSON file")
    parser.add_argument(
        "--install-peers", action="store_true", help="make virtual environments for the peers first"
    )
    return parser


if __name__ == "__main__":
    main()
