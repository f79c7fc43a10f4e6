"""What happens to the engines of a history: events as data, drawn from all kinds.

A history has the shape of its engines, its requests, and its events in order. It is JSON, so that
a failing one can be kept and replayed.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.oracle.requests import DrawnRequest, Menu, draw_prompts, draw_request

Event = tuple[Any, ...]  # its kind, and what belongs to it
Shape = dict[str, Any]

# How often each kind of event is drawn, beside the submissions. `turns` lets the engines work.
KINDS = {
    "turns": 14,
    "cancel": 1.2,  # a client leaves
    "evict": 0.7,  # cached blocks are lost
    "flush": 0.3,  # an operator empties the prefix cache
    "shrink": 0.4,  # blocks are taken from the pool, so that sequences are preempted
    "grow": 0.5,
    "fault": 1.4,  # a stage of the engine raises once
    "memory": 0.4,  # a step runs out of memory
    "nan": 0.4,  # a row of a step gives values that are not finite
    "kill": 1.2,  # the engine's process ends; requests continue in the next one
    "swap": 0.4,  # another engine takes over all requests
    "freeze": 0.3,  # the engine stands still, and then goes on
    "late": 0.5,  # the frontend reads the messages of several steps at once
    "tier_lost": 0.4,  # the tiers lose what they have
    "tier_fails": 0.3,  # the tiers raise
    "load_adapter": 0.2,
    "wait": 0.4,  # time passes
}
# Stages that are repeated, so that no request may fail
RETRIED = ("schedule", "forward", "sample", "wait", "publish")


@dataclass(frozen=True)
class History:
    shape: Shape
    requests: tuple[DrawnRequest, ...]
    events: tuple[Event, ...]  # ("submit", index) submits a request

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "requests": [each.to_json() for each in self.requests],
            "events": [list(each) for each in self.events],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "History":
        return cls(
            data["shape"],
            tuple(map(DrawnRequest.from_json, data["requests"])),
            tuple(map(tuple, data["events"])),
        )

    def __str__(self) -> str:
        """A few lines: the shape, each request's prompt and features, the events."""
        lines = [f"shape {json.dumps(self.shape)}"]
        for index, each in enumerate(self.requests):
            features = ", ".join(f"{name}={value}" for name, value in each.features.items())
            lines.append(f"request {index}: {list(each.prompt)} {features}")
        lines.append("events " + "; ".join(" ".join(map(str, each)) for each in self.events))
        return "\n".join(lines)

    @property
    def kinds(self) -> set[str]:
        return {each[0] for each in self.events}


@dataclass(frozen=True, eq=False)
class Stage:
    """What the histories of a level are drawn from: its models, and options of engines."""

    menu: Menu
    shapes: Mapping[str, tuple[Any, ...]]  # an engine's options, and the values of each
    without: frozenset[str] = frozenset()  # kinds of events that the level can't have
    models: tuple[str, ...] = ()  # the options that choose a model, of which "model" is its name
    menus: Mapping[str, Menu] = field(default_factory=dict)  # of models with menus of their own
    themes: tuple[str, ...] = ()  # features of which each pool has a few often
    calm: tuple[str, ...] = ("turns",)  # kinds of events in calm histories
    calm_shape: Shape = field(default_factory=dict)  # and options of their engines
    max_requests: int = 7
    max_events: int = 24


POOL_HISTORIES = 60  # that share a pool of requests, because what requests give alone takes long
POOL_REQUESTS = 24
NUM_THEMES, OFTEN = 3, 0.5  # frequent features of a pool, and their chance


@dataclass(frozen=True)
class Pool:
    """Requests of one model, from which several histories are drawn."""

    model: Shape
    requests: tuple[DrawnRequest, ...]


def draw_pool(
    rng: random.Random,
    stage: Stage,
    num_prompts: int = POOL_REQUESTS // 3,
    num_requests: int = POOL_REQUESTS,
) -> Pool:
    model = {name: rng.choice(stage.shapes[name]) for name in stage.models}
    menu = stage.menus.get(model.get("model", ""), stage.menu)
    if stage.themes:  # so that rare features meet
        often = dict.fromkeys(rng.sample(stage.themes, NUM_THEMES), OFTEN)
        menu = replace(menu, chances={**menu.chances, **often})
    prompts = draw_prompts(rng, menu, num_prompts)
    drawn = (draw_request(rng, menu, rng.choice(prompts)) for _ in range(num_requests))
    return Pool(model, tuple(drawn))


def draw_history(rng: random.Random, stage: Stage, pool: Pool | None = None) -> History:
    """A history. A quarter of them are calm: requests come and go, and nothing goes wrong. Without
    a pool, it has requests of its own.
    """
    shape = {name: rng.choice(values) for name, values in stage.shapes.items()}
    count = rng.randint(1, stage.max_requests)
    pool = pool or draw_pool(rng, stage, max(1, count - rng.randint(0, 2)), count)
    shape |= pool.model
    requests = [_request(rng, pool, index) for index in range(count)]
    kinds = {name: weight for name, weight in KINDS.items() if name not in stage.without}
    if rng.random() < 0.25:
        kinds = {name: KINDS[name] for name in stage.calm}
        shape |= stage.calm_shape
    events: list[Event] = [("submit", index) for index in range(count)]
    for _ in range(rng.randint(0, stage.max_events)):
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        events.insert(rng.randint(0, len(events)), _event(rng, kind, count))
    if (
        len(kinds) > len(stage.calm) and rng.random() < 0.5
    ):  # an engine dies while all of them may run
        last = max(index for index, each in enumerate(events) if each[0] == "submit")
        events[last + 1 : last + 1] = [("turns", rng.randint(1, 7)), _event(rng, "kill", count)]
    if shape.get("has_node"):
        events = [_at_node(event) if rng.random() < 0.5 else event for event in events]
    return History(shape, tuple(requests), tuple(events))


def _at_node(event: Event) -> Event:
    """The same event at the node."""
    return ("lose_node", *event[1:]) if event[0] == "kill" else event


def _request(rng: random.Random, pool: Pool, index: int) -> DrawnRequest:
    drawn = rng.choice(pool.requests)
    if index and rng.random() < 0.1:  # the next turn of an earlier conversation
        drawn = drawn.using(follows=rng.randrange(index))
    return drawn


def _event(rng: random.Random, kind: str, num_requests: int) -> Event:
    match kind:
        case "turns":
            return (kind, rng.choice([1, 1, 2, 3, 6]))
        case "cancel":
            return (kind, rng.randrange(num_requests))
        case "evict" | "shrink":
            return (kind, rng.randint(1, 12))
        case "fault":
            return (kind, rng.choice(RETRIED), rng.randint(1, 3))
        case "memory" | "nan":
            return (kind, rng.randint(1, 3))
        case "kill":
            return (kind, rng.choice([0, 1, 99]))  # how many of its last messages arrive
        case "freeze" | "late":
            return (kind, rng.randint(1, 4))
        case "tier_fails":
            return (kind, rng.randint(1, 6))
        case "load_adapter":
            return (kind, rng.randrange(8))
        case "wait":
            return (kind, rng.choice([0.1, 2.0, 20.0]))
    return (kind,)
