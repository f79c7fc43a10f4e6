"""Compares the native backend's perplexity and last words with llama.cpp's, on the same GGUF.

    python -m benchmarks.accuracy.run --llama-bin ~/llama.cpp/build/bin

Perplexity covers the first 20,480 tokens of Alice's Adventures in Wonderland in windows of 512, as
llama-perplexity computes it. Last words: passages of a few sentences are continued greedily, and
the first tokens must be those of the word that ends the passage (`text.py` has the rule).
The exit status is 1 if a perplexity differs from llama.cpp's by 0.5 % or more, or a share of found
words by 0.5 % of the passages or more. Each figure is printed when it is known. `--kernels all`
takes every kernel set that this CPU can run; last words are found with the best one alone.

Shares are noisy: any two ways of rounding disagree about a few passages, and each finds some that
the other does not. Equally good engines differ by the square root of that number.
"""

import argparse
import asyncio
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.accuracy.llama import Llama
from benchmarks.accuracy.ours import (
    ALL_NUMERICS,
    DEFAULT,
    FAST,
    GENERATED,
    continuations,
    perplexity,
    running,
)
from benchmarks.accuracy.text import passages, read_text, windows
from benchmarks.machine import machine, machine_line
from benchmarks.process import exit_on_sigterm
from engine.core.store.catalogue import DEFAULT_MODEL
from engine.core.store.model_store import resolve_model
from engine.core.store.pull import pull
from engine.core.text.tokenizer import Tokenizer
from engine.native.compiled import kernels
from engine.weights.model import ModelSource, open_model

BAR = 0.5  # percent


@dataclass(frozen=True, slots=True)
class Task:
    """The text as tokens."""

    text: str
    ids: list[int]
    prompts: list[list[int]]
    answers: list[list[int]]

    @property
    def lengths(self) -> list[int]:
        return [len(answer) for answer in self.answers]


@dataclass(frozen=True, slots=True)
class Words:
    """Greedy continuations of the passages, each as many tokens long as the last word."""

    said: list[list[int]]
    answers: list[list[int]]

    @property
    def found(self) -> list[bool]:
        return [said == answer for said, answer in zip(self.said, self.answers, strict=True)]

    @property
    def share(self) -> float:
        """Passages whose last word was found, in percent."""
        return 100 * sum(self.found) / len(self.found)

    def only(self, other: "Words") -> int:
        """Number of passages that this one found and the other did not."""
        pairs = zip(self.found, other.found, strict=True)
        return sum(mine and not theirs for mine, theirs in pairs)

    def same(self, other: "Words") -> float:
        """Passages with the same continuation, right or wrong, in percent."""
        return 100 * sum(map(list.__eq__, self.said, other.said)) / len(self.said)

    def noise(self, other: "Words") -> float:
        """One standard deviation of the difference of shares, in percent, if both are equally
        good.
        """
        return 100 * math.sqrt(self.only(other) + other.only(self)) / len(self.said)


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one engine or numerics setting."""

    label: str
    perplexity: float
    words: Words | None = None

    def perplexity_off(self, other: "Figures") -> float:
        """The difference of perplexities, in percent of the other's."""
        return 100 * (self.perplexity / other.perplexity - 1)


def make_task(tokenizer: Tokenizer) -> Task:
    text = read_text()
    chosen = passages(text)
    return Task(
        text,
        tokenizer.encode(text),
        [tokenizer.encode(passage.context) for passage in chosen],
        [tokenizer.encode(f" {passage.word}") for passage in chosen],
    )


def of_ours(
    source: ModelSource, task: Task, threads: int, kernel_sets: list[str], console: Console
) -> list[Figures]:
    """The figures of each kernel set, the best set first."""
    found = []
    best = kernels().instruction_sets()[-1]
    for isa in reversed(kernel_sets):
        for numerics in ALL_NUMERICS:
            label, words = f"{isa}: {numerics.label}", None
            with running(source, numerics, threads, isa) as runner:
                value = perplexity(runner, numerics, windows(task.ids))
                console.print(f"{label}: perplexity {value:.4f}")
                if isa == best and numerics in (DEFAULT, GENERATED, FAST):
                    said = continuations(runner, numerics, task.prompts, task.lengths)
                    words = Words(said, task.answers)
                    console.print(f"{label}: last words {words.share:.2f} %")
            found.append(Figures(label, value, words))
    return found


def of_llama(llama: Llama, task: Task, console: Console) -> Figures:
    value = llama.perplexity()
    console.print(f"llama.cpp: perplexity {value:.4f}")
    said = asyncio.run(llama.continuations(task.text, task.ids, task.prompts, task.lengths))
    words = Words(said, task.answers)
    console.print(f"llama.cpp: last words {words.share:.2f} %")
    return Figures("llama.cpp", value, words)


def comparison(ours: list[Figures], theirs: Figures | None, num_passages: int) -> Table:
    table = Table("numerics", title=f"perplexity, and last words of {num_passages:,} passages")
    for heading in ("PPL", "off, %", "words, %", "off, %", "same, %", "only we / they"):
        table.add_column(heading, justify="right")
    for each in ours if theirs is None else (theirs, *ours):
        words = each.words
        share = "" if words is None else f"{words.share:.2f}"
        cells = [each.label, f"{each.perplexity:.4f}", "", share]
        if theirs is not None and each is not theirs:
            cells[2] = f"{each.perplexity_off(theirs):+.3f}"
            if words is not None and theirs.words is not None:
                cells.append(f"{words.share - theirs.words.share:+.2f}")
                cells.append(f"{words.same(theirs.words):.1f}")
                cells.append(f"{words.only(theirs.words)} / {theirs.words.only(words)}")
        table.add_row(*cells)
    return table


def judge(ours: list[Figures], theirs: Figures) -> list[str]:
    """One line for each figure that is too far from llama.cpp's."""
    faults = []
    for each in ours:
        off = each.perplexity_off(theirs)
        if not abs(off) < BAR:
            faults.append(f"{each.label}: perplexity is off by {off:+.3f} %")
        if each.words is None or theirs.words is None:
            continue
        off = each.words.share - theirs.words.share
        if not abs(off) < BAR:
            noise = each.words.noise(theirs.words)
            faults.append(f"{each.label}: last words are off by {off:+.2f} %, noise {noise:.2f} %")
    return faults


def main() -> None:
    options = _parser().parse_args()
    console = Console(stderr=True, highlight=False)
    path = pull(options.model) if options.model == DEFAULT_MODEL else resolve_model(options.model)
    exit_on_sigterm()
    source = open_model(path)
    task = make_task(Tokenizer.from_gguf(source.metadata))
    theirs = None
    llama = Llama(options.llama_bin, source.path, options.threads)
    if llama.present:
        theirs = of_llama(llama, task, console)
    else:
        console.print(
            f"no llama.cpp in {options.llama_bin}: its figures are left out (--llama-bin)"
        )
    ours = of_ours(source, task, options.threads, _kernel_sets(options.kernels), console)
    Console().print(comparison(ours, theirs, len(task.prompts)))
    print(machine_line(machine()))
    if theirs is not None:
        print(f"llama.cpp {llama.version()}")
    if options.json is not None:
        rows = [asdict(each) for each in (*ours, *([] if theirs is None else [theirs]))]
        document = {"machine": machine(), "model": source.path.name, "figures": rows}
        options.json.write_text(json.dumps(document, indent=2))
    faults = [] if theirs is None else judge(ours, theirs)
    for line in faults:
        console.print(line)
    sys.exit(1 if faults else 0)


def _kernel_sets(asked: str) -> list[str]:
    here: list[str] = kernels().instruction_sets()
    if asked == "all":
        return here
    if asked != "best" and asked not in here:
        sys.exit(f"{asked}: not a kernel set of this CPU, which has {', '.join(here)}")
    return here[-1:] if asked == "best" else [asked]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file or a pulled model")
    parser.add_argument("--llama-bin", type=Path, default=Path("/usr/local/bin"), metavar="DIR")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kernels", default="best", metavar="SET", help="best, all or a name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser


if __name__ == "__main__":
    main()
