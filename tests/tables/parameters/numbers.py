"""The parameters that are numbers: bounds and defaults, as docs/parameters.md tells them."""

import math
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 2**24


@dataclass(frozen=True)
class Number:
    low: float
    high: float
    default: float | None
    preset: float | None  # a value that a preset of the test has; None: presets have no such field
    value: float  # another one, which a request has
    seen: str = ""  # where the backend sees it, if not as a sampling parameter of its name

    @property
    def is_whole(self) -> bool:
        return isinstance(self.value, int)

    def beyond(self) -> tuple[float, float]:
        """The nearest values that are not allowed."""
        if self.is_whole:
            return self.low - 1, self.high + 1
        return math.nextafter(self.low, -math.inf), math.nextafter(self.high, math.inf)


NUMBERS = {
    "temperature": Number(0, 2, 1.0, 0.25, 0.5),
    "top_p": Number(0, 1, 1.0, 0.75, 0.5),
    "top_k": Number(-1, MAX_TOKENS, 0, 7, 9),
    "min_p": Number(0, 1, 0.0, 0.25, 0.5),
    "repetition_penalty": Number(0.01, 10, 1.0, 1.25, 1.5),
    "presence_penalty": Number(-2, 2, 0.0, 0.25, -0.5),
    "frequency_penalty": Number(-2, 2, 0.0, -0.25, 0.5),
    "repeat_last_n": Number(-1, MAX_TOKENS, -1, 70, 9),
    "typical_p": Number(0, 1, 1.0, 0.75, 0.5),
    "top_n_sigma": Number(-1, 100, 0.0, 2.5, 1.5),
    "xtc_probability": Number(0, 1, 0.0, 0.75, 0.5),
    "xtc_threshold": Number(0, 1, 0.1, 0.75, 0.5),
    "dry_multiplier": Number(0, 100, 0.0, 2.5, 1.5),
    "dry_base": Number(1, 100, 1.75, 2.5, 1.5),
    "dry_allowed_length": Number(0, MAX_TOKENS, 2, 7, 9),
    "dry_penalty_last_n": Number(-1, MAX_TOKENS, -1, 7, 9),
    "min_keep": Number(0, MAX_TOKENS, 0, 7, 9),
    "dynatemp_range": Number(0, 10, 0.0, 2.5, 1.5),
    "dynatemp_exponent": Number(0, 100, 1.0, 2.5, 1.5),
    "mirostat": Number(0, 2, 0, 1, 2),
    "mirostat_tau": Number(0, 100, 5.0, 2.5, 1.5),
    "mirostat_eta": Number(0, 10, 0.1, 2.5, 1.5),
    "min_tokens": Number(0, MAX_TOKENS, 0, None, 3),
    "seed": Number(-(2**63), 2**64 - 1, None, 77, 5),
    "n": Number(1, 16, 1, None, 1),
    "priority": Number(-100, 100, 0, None, -5, seen="priority"),
}
PRESET = {name: each.preset for name, each in NUMBERS.items() if each.preset is not None}
PRESET_LIMIT = 40  # `max_tokens` of the preset
LIMIT = 24  # and of a request
# Bounds of an API that differ, by endpoint and parameter.
OTHER_BOUNDS: dict[tuple[str, str], tuple[float, float]] = {
    ("messages", "temperature"): (0, 1),
    ("messages", "top_k"): (0, MAX_TOKENS),
    ("llamacpp", "seed"): (-1, 2**64 - 1),
    ("infill", "seed"): (-1, 2**64 - 1),
}
# Parameters that an endpoint refuses, besides those that its body has no field for.
REFUSED = {
    ("responses", "n"),
    ("ollama chat", "n"),
    ("ollama generate", "n"),
    ("batch chat", "n"),
    ("kserve", "n"),
    ("huggingface", "n"),
}
# Names of other servers, each with ours. They are accepted where ours is.
ALIASES = {
    "repeat_penalty": "repetition_penalty",
    "typical": "typical_p",
    "random_seed": "seed",
    "n_cmpl": "n",
    "min_new_tokens": "min_tokens",
}
# The same for the length of an answer, with the values that mean "no limit but the context".
LIMITS: dict[str, tuple[int, ...]] = {
    "max_tokens": (),
    "max_completion_tokens": (),
    "max_new_tokens": (),
    "n_predict": (-1,),
    "num_predict": (-1, -2),
}
# What no number is. JSON has no other types; the last is a digit that only Unicode knows.
NO_NUMBERS: tuple[Any, ...] = (
    "1",
    "a",
    True,
    False,
    [],
    [1],
    {},
    {"a": 1},
    "\N{FULLWIDTH DIGIT ONE}",
)


def expected(name: str, value: float) -> dict[str, Any]:
    """What the backend sees of a parameter with this value."""
    if name == "top_p" and value == 0:
        return {"top_k": 1, "top_p": 1.0}
    if name == "top_k":
        return {"top_k": max(0, value)}
    if name == "seed":
        return {"seed": value % 2**63}
    return {name: value}
