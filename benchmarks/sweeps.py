"""Sweeps: one figure of every server over a range of loads, stored as JSON.

concurrency  output tok/s of 128 in, 128 out, with 1 to 64 requests at once
context      time per decoded token, one request at a time, after 128 to 8,000 tokens
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.client import new_session
from benchmarks.machine import machine
from benchmarks.process import RunningServer
from benchmarks.report import value_at
from benchmarks.run import REQUEST_TIMEOUT, server_specs
from benchmarks.scenarios import SCENARIOS, Measurement, Scenario
from benchmarks.starts import Say, live_servers

CONTEXT_OUTPUT = 48  # tokens decoded after each prompt


@dataclass(frozen=True, slots=True)
class Sweep:
    """Scenarios by the number on the horizontal axis, and what is read off each."""

    name: str
    loads: tuple[tuple[int, Scenario], ...]
    path: tuple[str, ...]  # keys of the figure, in a scenario's figures
    sequences: int  # sequences that a server must be able to hold at once
    context: int

    def upto(self, largest: int) -> "Sweep":
        return replace(self, loads=tuple(load for load in self.loads if load[0] <= largest))


def _concurrent(level: int) -> Scenario:
    return replace(SCENARIOS["conc"], concurrency=level)


def _after(tokens: int) -> Scenario:
    name = f"context {tokens}"
    return Scenario(name, requests=3, prompt_words=tokens, output_tokens=CONTEXT_OUTPUT)


SWEEPS = {
    "concurrency": Sweep(
        "concurrency",
        tuple((level, _concurrent(level)) for level in (1, 2, 4, 8, 16, 32, 64)),
        ("output_tps",),
        sequences=64,
        context=1024,
    ),
    "context": Sweep(
        "context",
        tuple((tokens, _after(tokens)) for tokens in (128, 512, 1024, 2048, 4096, 8000)),
        ("tpot_ms", "p50"),
        sequences=1,
        context=8192,
    ),
}


async def sweep(
    chosen: Sweep, options: argparse.Namespace, model: Path, logs: Path, say: Say
) -> dict[str, Any]:
    """Measure every server in turn at every load; the document that `draw` reads."""
    specs = server_specs(options, model, say, sequences=chosen.sequences, context=chosen.context)
    async with live_servers(specs, logs, say) as running:
        points = await _points(chosen, running, options.rounds, say)
    return {
        "sweep": chosen.name,
        "machine": machine(),
        "model": model.stem,
        "servers": {
            spec.name: {"note": spec.note, "points": points[spec.name]}
            for spec in specs
            if spec.name in points
        },
    }


async def _points(
    chosen: Sweep, running: dict[str, RunningServer], rounds: int, say: Say
) -> dict[str, list[dict[str, float]]]:
    measured = {
        name: [(x, Measurement(load, server.target, server.pid)) for x, load in chosen.loads]
        for name, server in running.items()
    }
    for number in range(rounds):
        for position, (x, _) in enumerate(chosen.loads):
            for name in running:
                say(f"round {number + 1}: {chosen.name} {x} on {name}")
                async with new_session(REQUEST_TIMEOUT) as session:
                    measurement = measured[name][position][1]
                    await measurement.warm_up(session, f"round-{number}", 1)
                    await measurement.add_batch(session, f"round-{number}")
    return {name: _known_points(chosen.path, each) for name, each in measured.items()}


def _known_points(
    path: tuple[str, ...], measured: Sequence[tuple[int, Measurement]]
) -> list[dict[str, float]]:
    """A load that the server refused, being beyond its limits, has no point."""
    points = []
    for x, measurement in measured:
        figures = measurement.figures()
        value = value_at(figures, path)
        if value is not None and not figures["failed"]:
            points.append({"x": x, "y": value})
    return points


def write(document: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['sweep']}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path
