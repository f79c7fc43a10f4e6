"""Measures what speculation saves: CPU seconds per output token with and without it.

Both engines are in this process and share one loaded model, without HTTP. They run the same
requests in alternating rounds, and their tokens must be equal. Only steps after the prompts count.
The figures are medians, so they hold on a machine that others use. "guessing" is the share of the
CPU time in which guesses were made, by lookup and by the draft model if there is one. It is
measured inside the engine, so it is exact where the speed of the machine varies.

    python -m benchmarks.features.speculation --rounds 7
    python -m benchmarks.features.speculation --only chat --streams 32
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.core.interfaces.request import Deltas, GenerateRequest, SamplingParams
from engine.core.store.pull import pull
from engine.frontend.text_model import TextModel, load_text
from engine.ipc.options import EngineOptions
from engine.runtime.loop import EngineLoop
from engine.runtime.sequence import Row
from engine.runtime.speculation.draft_model import DraftModel
from engine.runtime.speculation.drafts import Speculation
from engine.weights.model import open_model
from engine.worker.draft import plan_draft
from engine.worker.loading import load_runner
from engine.worker.main import build_loop, planned

RECORDS = [
    {"id": 4100 + 7 * n, "name": name, "city": city, "active": n % 2 == 0, "score": 61.5 + 3 * n}
    for n, (name, city) in enumerate(
        [("Ada", "London"), ("Grace", "New York"), ("Linus", "Helsinki"), ("Margaret", "Boston")]
    )
]
CODE = '''def total_price(items, tax_rate):
    """Return the price of all items with tax."""
    subtotal = 0
    for item in items:
        if item.quantity < 0:
            raise ValueError("quantity must not be negative")
        subtotal += item.price * item.quantity
    tax = subtotal * tax_rate
    return round(subtotal + tax, 2)
'''
COPIES = (
    f"Repeat this JSON exactly, and write nothing else:\n{json.dumps(RECORDS, indent=2)}",
    f"Rename the variable subtotal to amount, and write the whole file again:\n{CODE}",
)
CHATS = (
    "What is the capital of France, and what is it known for?",
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "Give me three tips for learning a new language.",
    "Why is the sky blue?",
    "Describe the taste of an orange to someone who never ate one.",
    "What should I consider before I adopt a dog?",
    "How does a refrigerator work?",
)


@dataclass(frozen=True)
class Scenario:
    name: str
    prompts: tuple[str, ...]
    streams: int
    output_tokens: int
    temperature: float


def scenarios() -> list[Scenario]:
    copy = [Scenario("copy", COPIES, 1, 192, 0.0)]
    return copy + [Scenario("chat", CHATS, streams, 128, 0.7) for streams in (1, 8, 32)]


@dataclass
class Memory:
    """The engine's connection to this program."""

    inbox: list = field(default_factory=list)
    outbox: list = field(default_factory=list)

    def poll(self, timeout_s: float) -> list:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: object) -> None:
        self.outbox.append(message)


@dataclass(frozen=True)
class Round:
    """CPU seconds per output token, the share of them that guesses took, the tokens of each
    request, and counts of drafts.
    """

    cost: float
    guessing: float
    outputs: dict[str, list[int]]
    num_drafted: int
    num_accepted: int


class Guessing:
    """CPU seconds that an engine takes for guesses."""

    def __init__(self, loop: EngineLoop) -> None:
        self.seconds = 0.0
        if (speculation := loop.scheduler.find(Speculation)) is not None:
            self._add_drafts = speculation.add_drafts
            speculation.add_drafts = self._timed

    def _timed(self, rows: list[Row], budget: int) -> int:
        began = time.process_time()
        num_tokens = self._add_drafts(rows, budget)
        self.seconds += time.process_time() - began
        return num_tokens


class Bench:
    """One loaded model, and how an engine for it is made. `draft` is the path of a draft model for
    the engines that speculate; `model` is a path then.
    """

    def __init__(self, model: str, draft: str = "") -> None:
        path = Path(model) if draft else pull(model)
        # No prefix cache: a round must not profit from the round before.
        self._options = planned(
            EngineOptions(
                model_path=str(path), framework="native", cache_enabled=False, draft_model=draft
            )
        )
        self._text: TextModel = load_text(path)
        source = open_model(path)
        self._runner, config, self._plan = load_runner(source, self._options)
        self._draft: DraftModel | None = None
        if draft:
            self._draft = plan_draft(source, self._options).load("native", config)

    def _new_loop(self, speculation: str, channel: Memory) -> EngineLoop:
        options = msgspec.structs.replace(self._options, speculation=speculation)
        draft = self._draft if speculation == "auto" else None
        return build_loop(self._runner, options, self._plan.bytes_per_token, channel, draft=draft)

    def requests(self, scenario: Scenario) -> list[GenerateRequest]:
        params = {"max_tokens": scenario.output_tokens, "temperature": scenario.temperature}
        found = []
        for index in range(max(scenario.streams, len(scenario.prompts))):
            message = {"role": "user", "content": scenario.prompts[index % len(scenario.prompts)]}
            prompt = self._text.chat.template.render([message], self._text.tokenizer.specials)
            ids = tuple(self._text.tokenizer.encode_rendered(prompt))
            found.append(
                GenerateRequest(
                    request_id=str(index),
                    prompt=ids,
                    params=SamplingParams(seed=index, ignore_eos=False, **params),
                    eos_ids=self._text.eos_ids,
                )
            )
        return found

    def run(self, scenario: Scenario, speculation: str) -> Round:
        """Run all requests, as many at a time as the scenario has streams."""
        channel = Memory()
        loop = self._new_loop(speculation, channel)
        guessing = Guessing(loop)
        waiting, outputs = self.requests(scenario), {}
        seconds, num_tokens, num_open = 0.0, 0, 0
        while waiting or num_open:
            while waiting and num_open < scenario.streams:
                channel.inbox.append(waiting.pop(0))
                num_open += 1
            # A step with a prompt is not counted.
            is_decode = all(
                seq.num_computed >= seq.num_prompt for seq in loop.scheduler.table.sequences()
            )
            is_decode = is_decode and not channel.inbox
            began = time.process_time()
            loop.turn(0.0)
            took = time.process_time() - began
            seconds += took if is_decode else 0.0
            for message in channel.outbox:
                for delta in message.deltas if isinstance(message, Deltas) else ():
                    outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
                    num_tokens += len(delta.token_ids) if is_decode else 0
                    num_open -= delta.finish_reason is not None
            channel.outbox.clear()
        stats = loop.stats()
        return Round(
            seconds / num_tokens,
            guessing.seconds / seconds,
            outputs,
            stats.num_drafted_tokens,
            stats.num_accepted_tokens,
        )


def compare(bench: Bench, scenario: Scenario, num_rounds: int, say: Callable[[str], None]) -> dict:
    bench.run(scenario, "off")  # the first run of a shape also pays for memory pages
    costs: dict[str, list[float]] = {"off": [], "auto": []}
    ratios, shares = [], []
    for _ in range(num_rounds):
        pair = {setting: bench.run(scenario, setting) for setting in costs}
        assert pair["off"].outputs == pair["auto"].outputs, "speculation changed the tokens"
        for setting, found in pair.items():
            costs[setting].append(found.cost)
        ratios.append(pair["off"].cost / pair["auto"].cost)
        shares.append(pair["auto"].guessing)
    drafted, accepted = pair["auto"].num_drafted, pair["auto"].num_accepted
    result = {
        "scenario": scenario.name,
        "streams": scenario.streams,
        "cpu_ms_per_token": {
            name: round(1e3 * statistics.median(values), 3) for name, values in costs.items()
        },
        "speedup": round(statistics.median(ratios), 3),
        "guessing": round(statistics.median(shares), 4),
        "drafted": drafted,
        "accepted": accepted,
    }
    say(json.dumps(result))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("copy", "chat"))
    parser.add_argument("--streams", type=int)
    arguments = parser.parse_args()
    bench = Bench(arguments.model)
    for scenario in scenarios():
        if arguments.only in (None, scenario.name) and arguments.streams in (
            None,
            scenario.streams,
        ):
            compare(bench, scenario, arguments.rounds, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
