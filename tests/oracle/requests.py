"""Requests drawn from all features at once, as data that every level can carry out.

A prompt is a list of indices of the level's words. A feature is a name with a JSON value, so a
request can be printed, kept in a file, sent over HTTP, and shrunk by leaving features out.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Value = Any  # of JSON


@dataclass(frozen=True)
class Menu:
    """What the requests of a level can ask for. What is empty or False is never drawn."""

    num_words: int  # prompts are made of word 0 .. num_words - 1
    max_prompt: int  # words
    max_tokens: int
    tokens: tuple[int, ...] = ()  # token ids for biases, stop tokens and the like
    ends: tuple[int, ...] = ()  # token ids that end an answer
    stops: tuple[str, ...] = ()
    stop_patterns: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    breakers: tuple[str, ...] = ()  # of DRY
    grammars: tuple[str, ...] = ()  # names or sources, as the level reads them
    num_tools: int = 0
    has_reasoning: bool = False
    has_echo: bool = True
    adapters: tuple[str, ...] = ()
    steerings: tuple[str, ...] = ()
    captures: tuple[str, ...] = ()
    lenses: tuple[int, ...] = ()  # layers whose logits a request can read
    patterns: tuple[int, ...] = ()  # layers whose attention a request can read
    has_attribution: bool = False
    images: tuple[str, ...] = ()
    poisons: tuple[str, ...] = ()  # ways in which a prompt makes its own request fail
    has_deadlines: bool = False
    chances: Mapping[str, float] = field(default_factory=dict)  # of features, if not the usual ones
    plain: float = 0.0  # the share of requests that only have plain features
    apis: tuple[str, ...] = ()  # in which a request may be sent


@dataclass(frozen=True)
class DrawnRequest:
    """A request. Two requests with the same prompt and features must give the same result."""

    prompt: tuple[int, ...]
    features: Mapping[str, Value] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Value:
        return self.features.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self.features

    @cached_property
    def sampling(self) -> dict[str, Value]:
        """The fields of `SamplingParams` that the features set, besides texts for the frontend."""
        found: dict[str, Value] = {}
        for name, value in self.features.items():
            if FEATURES[name].is_sampling:
                found |= value
        return found

    @property
    def reads(self) -> bool:
        """Whether the request reads values inside of the model."""
        return any(name in self for name in ("captures", "lens", "pattern", "attribution"))

    @property
    def num_choices(self) -> int:
        return int(self.sampling.get("n", 1))

    def without(self, name: str) -> "DrawnRequest":
        left = {key: value for key, value in self.features.items() if key != name}
        return DrawnRequest(self.prompt, left)

    def using(self, **features: Value) -> "DrawnRequest":
        return DrawnRequest(self.prompt, {**self.features, **features})

    @cached_property
    def key(self) -> str:
        """Equal for requests that must give the same result alone."""
        told = {name: value for name, value in self.features.items() if FEATURES[name].is_result}
        return json.dumps([self.prompt, told], sort_keys=True)

    def to_json(self) -> dict[str, Value]:
        return {"prompt": list(self.prompt), "features": dict(self.features)}

    @classmethod
    def from_json(cls, data: Mapping[str, Value]) -> "DrawnRequest":
        return cls(tuple(data["prompt"]), data["features"])


@dataclass(frozen=True)
class Feature:
    """How often a feature is drawn, and with which values. `draw` returns None where the menu of a
    level does not have it.
    """

    chance: float
    draw: Callable[[random.Random, Menu], Value]
    is_sampling: bool = True  # whether the value is a part of the sampling parameters
    is_result: bool = True  # whether the result may depend on it
    excludes: tuple[str, ...] = ()  # features that a request with this one can't have


def _one(values: Sequence[Value]) -> Callable[[random.Random, Menu], Value]:
    return lambda rng, menu: rng.choice(values)


def _of(name: str) -> Callable[[random.Random, Menu], Value]:
    """One of the menu's values of this name."""

    def draw(rng: random.Random, menu: Menu) -> Value:
        values = getattr(menu, name)
        return rng.choice(values) if values else None

    return draw


def _some(field_name: str, name: str, most: int) -> Callable[[random.Random, Menu], Value]:
    """A sampling parameter with up to `most` of the menu's values of a name."""

    def draw(rng: random.Random, menu: Menu) -> Value:
        values = getattr(menu, name)
        if not values:
            return None
        return {field_name: sorted(rng.sample(values, rng.randint(1, min(most, len(values)))))}

    return draw


def _if(name: str, value: Value) -> Callable[[random.Random, Menu], Value]:
    return lambda rng, menu: value if getattr(menu, name) else None


def _penalties(rng: random.Random, menu: Menu) -> Value:
    drawn = {
        "repetition_penalty": rng.choice([0.7, 1.0, 1.3, 2.0]),
        "presence_penalty": rng.choice([-0.5, 0.0, 0.7]),
        "frequency_penalty": rng.choice([-0.3, 0.0, 0.4]),
    }
    return drawn | rng.choice([{}, {}, {"repeat_last_n": rng.choice([0, 1, 3, 8])}])


def _bias(rng: random.Random, menu: Menu) -> Value:
    chosen = rng.sample(menu.tokens, min(2, len(menu.tokens)))
    return {"logit_bias": [[token, rng.choice([-100.0, -2.0, 2.0])] for token in chosen]}


def _allowed(rng: random.Random, menu: Menu) -> Value:
    count = min(len(menu.tokens), rng.randint(3, 8))
    return {"allowed_token_ids": sorted(rng.sample(menu.tokens, count)) + list(menu.ends)}


def _mirostat(rng: random.Random, menu: Menu) -> Value:
    tau, eta = rng.choice([1.0, 2.0, 5.0]), rng.choice([0.1, 0.7])
    return {"mirostat": rng.choice([1, 2]), "mirostat_tau": tau, "mirostat_eta": eta}


def _dry(rng: random.Random, menu: Menu) -> Value:
    drawn: dict[str, Value] = {"dry_multiplier": rng.choice([2.0, 5.0]), "dry_allowed_length": 1}
    drawn["dry_penalty_last_n"] = rng.choice([-1, -1, 4])
    breakers = list(menu.breakers) and rng.sample(menu.breakers, 1)
    return drawn | {"dry_sequence_breakers": breakers}


def _captures(rng: random.Random, menu: Menu) -> Value:
    if not menu.captures:
        return None
    names = sorted(rng.sample(menu.captures, rng.randint(1, min(2, len(menu.captures)))))
    phases = [rng.choice(["both", "both", "prompt", "decode"]) for _ in names]
    return [list(each) for each in zip(names, phases, strict=True)]


def _lens(rng: random.Random, menu: Menu) -> Value:
    """Layers, the number of tokens of each position, and which positions."""
    if not menu.lenses:
        return None
    layers = sorted(rng.sample(menu.lenses, rng.randint(1, min(2, len(menu.lenses)))))
    return [layers, rng.choice([1, 3]), rng.choice(["both", "prompt", "decode"])]


def _pattern(rng: random.Random, menu: Menu) -> Value:
    if not menu.patterns:
        return None
    return [rng.choice(menu.patterns), rng.choice(["both", "prompt", "decode"])]


def _steering(rng: random.Random, menu: Menu) -> Value:
    if not menu.steerings:
        return None
    return [rng.choice(menu.steerings), rng.choice(["both", "both", "prompt", "decode"])]


def _image(rng: random.Random, menu: Menu) -> Value:
    """An image, and the word of the prompt before which it is."""
    return [rng.choice(menu.images), rng.randint(0, 3)] if menu.images else None


SEEDS = 8  # few, so that the same request often comes again
BUSY = ("grammar", "tools")
FEATURES: dict[str, Feature] = {
    "seed": Feature(1.0, lambda rng, menu: {"seed": rng.randrange(SEEDS)}),
    "max_tokens": Feature(1.0, lambda rng, menu: {"max_tokens": rng.randint(1, menu.max_tokens)}),
    "temperature": Feature(
        0.6, lambda rng, menu: {"temperature": rng.choice([0.5, 0.7, 1.0, 1.0, 1.5])}
    ),
    "top_k": Feature(0.08, lambda rng, menu: {"top_k": rng.choice([1, 3, 10])}),
    "top_p": Feature(0.08, lambda rng, menu: {"top_p": rng.choice([0.2, 0.6, 0.9])}),
    "min_p": Feature(0.08, lambda rng, menu: {"min_p": rng.choice([0.01, 0.1, 0.5])}),
    "penalties": Feature(0.2, _penalties),
    "logit_bias": Feature(0.08, _bias),
    "mirostat": Feature(0.08, _mirostat),
    "dry": Feature(0.08, _dry),
    "xtc": Feature(
        0.05, lambda rng, menu: {"xtc_probability": 0.5, "xtc_threshold": rng.choice([0.02, 0.05])}
    ),
    "typical_p": Feature(0.05, lambda rng, menu: {"typical_p": rng.choice([0.3, 0.6])}),
    "top_n_sigma": Feature(0.05, lambda rng, menu: {"top_n_sigma": rng.choice([0.5, 0.9])}),
    "min_keep": Feature(0.04, _one([{"min_keep": 3}])),
    "dynatemp": Feature(0.05, _one([{"dynatemp_range": 0.6, "dynatemp_exponent": 1.5}])),
    "samplers": Feature(
        0.04,
        _one(
            [
                {"samplers": ["penalties", "min_p", "temperature", "top_k"]},
                {"samplers": ["dry", "min_p", "temperature"]},
            ]
        ),
    ),
    "min_tokens": Feature(0.08, lambda rng, menu: {"min_tokens": rng.choice([1, 2, 4])}),
    "ignore_eos": Feature(0.08, _one([{"ignore_eos": True}])),
    "allowed": Feature(0.05, _allowed, excludes=BUSY),
    "bad_words": Feature(0.07, _some("bad_words", "bad_words", 2)),
    "stop_token_ids": Feature(0.08, _some("stop_token_ids", "tokens", 2), excludes=BUSY),
    "stop": Feature(0.15, _some("stop", "stops", 2)),
    "stop_regex": Feature(0.06, _some("stop_regex", "stop_patterns", 1)),
    "n": Feature(0.18, lambda rng, menu: {"n": rng.choice([2, 2, 3])}),
    "logprobs": Feature(0.3, lambda rng, menu: {"logprobs": rng.choice([0, 1, 3])}),
    "score_prompt": Feature(
        0.12, lambda rng, menu: {"score_prompt": True} if menu.has_echo else None
    ),
    "echo": Feature(0.1, _if("has_echo", True), is_sampling=False),
    "grammar": Feature(0.15, _of("grammars"), is_sampling=False, excludes=("tools",)),
    "tools": Feature(
        0.12,
        lambda rng, menu: rng.choice(["auto", "required"]) if menu.num_tools else None,
        is_sampling=False,
        excludes=("echo", "score_prompt"),
    ),
    "reasoning": Feature(0.1, _if("has_reasoning", True), is_sampling=False, excludes=("echo",)),
    "adapter": Feature(0.2, _of("adapters"), is_sampling=False),
    "steering": Feature(0.1, _steering, is_sampling=False),
    "captures": Feature(0.12, _captures, is_sampling=False, excludes=("n",)),
    "lens": Feature(0.06, _lens, is_sampling=False, excludes=("n",)),
    "pattern": Feature(0.1, _pattern, is_sampling=False, excludes=("n",)),
    # The position of the token whose logit is divided among the parts of the model
    "attribution": Feature(
        0.08,
        lambda rng, menu: rng.choice([-1, -1, 0]) if menu.has_attribution else None,
        is_sampling=False,
        excludes=("n",),
    ),
    "image": Feature(0.1, _image, is_sampling=False, excludes=("echo",)),
    # The share of the expected answer that is right
    "prediction": Feature(0.2, _one([1.0, 0.8, 0.0]), is_sampling=False, is_result=False),
    "priority": Feature(0.25, _one([1, 2, -1]), is_sampling=False, is_result=False),
    "tenant": Feature(0.3, _one(["b", "c"]), is_sampling=False, is_result=False),
    "salt": Feature(0.2, _one(["x", "y"]), is_sampling=False, is_result=False),
    # Seconds until the request must have ended
    "deadline": Feature(
        0.05,
        lambda rng, menu: rng.choice([0.05, 0.5]) if menu.has_deadlines else None,
        is_sampling=False,
        is_result=False,
    ),
    # How the client takes the answer: each event at once, or a few at a time with long pauses.
    "reader": Feature(0.25, _one(["iterates", "slow"]), is_sampling=False, is_result=False),
    "progress": Feature(0.1, _one([True]), is_sampling=False, is_result=False),
    "api": Feature(1.0, _of("apis"), is_sampling=False, is_result=False),
    "poison": Feature(0.03, _of("poisons"), is_sampling=False),
    # The request of the history whose prompt and answer this prompt continues. Drawn with a history
    "follows": Feature(0.0, _one([0]), is_sampling=False, is_result=False),
}


# Features that do not change what a request gives, and that would only disturb it alone
AROUND = ("deadline", "reader", "progress", "priority", "salt", "tenant", "follows", "prediction")

# Features that meet others in a state: of a sampler, of a choice, of what the client has by now
THEMES = ("penalties", "mirostat", "dry", "min_tokens", "stop_regex", "stop", "n", "logprobs")
THEMES += ("score_prompt", "grammar", "tools", "reasoning", "adapter", "prediction", "progress")
# Features with which a small model guesses what the model samples
PLAIN = {"seed", "max_tokens", "temperature", "top_k", "top_p", "min_p", "ignore_eos", "stop"}
PLAIN |= {"stop_token_ids", "n", "logprobs", "echo", *AROUND}


def draw_request(rng: random.Random, menu: Menu, prompt: tuple[int, ...]) -> DrawnRequest:
    """A request with this prompt. Each feature is drawn on its own, so every pair meets."""
    drawn: dict[str, Value] = {}
    is_plain = menu.plain and rng.random() < menu.plain
    for name, feature in FEATURES.items():
        if is_plain and name not in PLAIN:
            continue
        if rng.random() >= menu.chances.get(name, feature.chance):
            continue
        if any(name in FEATURES[other].excludes or other in feature.excludes for other in drawn):
            continue
        value = feature.draw(rng, menu)
        if value is not None:
            drawn[name] = value
    return DrawnRequest(prompt, drawn)


def draw_prompts(rng: random.Random, menu: Menu, count: int) -> list[tuple[int, ...]]:
    """Prompts of which several share a beginning, so that they find each other's blocks."""
    trunk = tuple(rng.randrange(menu.num_words) for _ in range(menu.max_prompt))
    prompts = []
    for _ in range(count):
        kept = rng.choice([0, menu.max_prompt, rng.randint(0, menu.max_prompt)])
        length = rng.randint(max(1, kept), menu.max_prompt)
        tail = tuple(rng.randrange(menu.num_words) for _ in range(length - kept))
        prompts.append(trunk[: rng.randint(1, kept)] + tail if kept else tail)
    return prompts
