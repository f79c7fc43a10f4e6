"""Values for fields by their name, where a schema alone would not get deep into the server."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.scoreboard.hostile import grammars, messages
from tests.scoreboard.hostile.interp import interp
from tests.scoreboard.hostile.values import text, words
from tests.support.files.dialect_examples import ACTS, SAME

VOCABULARY = 49_152  # of the default model
LONG_PROMPTS = (200, 200, 200, 600, 1_500)  # in words, which are tokens here
LONG_SHARE = 0.01
RESULTS = ("interp", "cmpl", "chatcmpl")  # prefixes of ids that captures are stored under
MAX_KNOWN = 8  # ids that are remembered of each kind


@dataclass
class Known:
    """What a client knows of a server: its model, and ids of stored objects by their prefix."""

    model: str
    sees: bool = False  # whether the model takes images
    ids: dict[str, list[str]] = field(default_factory=dict)

    def learn(self, id: str) -> None:
        prefix = id.partition("-")[0].partition("_")[0]
        kept = self.ids.setdefault(prefix, [])
        if id not in kept:
            kept.append(id)
            del kept[:-MAX_KNOWN]

    @property
    def results(self) -> list[str]:
        """The ids of stored captures."""
        return [id for prefix in RESULTS for id in self.ids.get(prefix, ())]

    def one(self, rng: random.Random, *prefixes: str) -> str:
        """A known id, or one that is none."""
        found = [id for prefix in prefixes for id in self.ids.get(prefix, ())]
        nothing = (f"{prefixes[0]}_absent", "x" * 5_000, text(rng), "..", "%00", "a/b")
        return rng.choice(found) if found and rng.random() < 0.8 else rng.choice(nothing)


Draw = Callable[[random.Random, Known], Any]


def prompt(rng: random.Random, known: Known) -> Any:
    if rng.random() < LONG_SHARE:
        return words(rng, rng.choice(LONG_PROMPTS))
    match rng.randrange(12):
        case 0:
            return text(rng)
        case 1:
            return [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 5, 60)))]
        case 2:
            return [rng.choice((0, VOCABULARY - 1, VOCABULARY, 2**31 - 1, 2**31, -1))] * 3
        case 3:
            return [words(rng, 2)] * rng.choice((1, 2, 3, 16, 128, 129, 3_000))
        case 4:
            return [[1, 2], "a", [3]]
        case 5:
            return rng.choice(([], "", [[]], [""], [None], [1, "a"]))
        case 6:
            return {"prompt_string": words(rng, 2), "multimodal_data": [messages.image_base64(rng)]}
    return words(rng, rng.choice((1, 3, 8)))


def _texts(rng: random.Random, known: Known) -> Any:
    many = rng.choice((1, 2, 3, 40, 2_048, 2_049))
    return rng.choice(
        (words(rng, 2), text(rng), [words(rng, 2)] * min(many, 40), [text(rng)] * many, [[1, 2]])
    )


def _bias(rng: random.Random, known: Known) -> Any:
    count = rng.choice((1, 2, 1_024, 1_025, VOCABULARY))
    return rng.choice(
        (
            {str(id): rng.choice((-100, 100, 0.5)) for id in range(count)},
            [[id, rng.choice((False, 2.5, -100))] for id in range(count)],
            {str(VOCABULARY): 1, "-1": 1, "007": 1, "hello": 1, "1e3": 1},
            [["hello", 1], ["", 1], [text(rng), False]],
        )
    )


def _length(rng: random.Random, known: Known) -> int:
    """Short nearly always: others wait for the tokens."""
    return rng.choice((0, -1, 2_048, 2**24)) if rng.random() < 0.03 else rng.choice((1, 1, 2, 4))


def _options(rng: random.Random, known: Known) -> dict[str, Any]:
    return {
        "num_predict": _length(rng, known),
        **rng.choice(
            (
                {"num_ctx": rng.choice((0, 1, 2**31, -1, 4_096))},
                {"stop": [text(rng)] * rng.choice((1, 16, 17))},
                {"repeat_penalty": rng.choice((0, 1.5, 1e9)), "mirostat": 2, "seed": -1},
                {text(rng): text(rng)},
                {"temperature": rng.choice((0, 2, 2.1)), "top_k": rng.choice((0, 2**31))},
            )
        ),
    }


def _sampling(rng: random.Random, known: Known) -> Any:
    """SGLang's: one object, or one for each prompt."""
    one = {
        "max_new_tokens": _length(rng, known),
        **rng.choice(
            (
                {"n": rng.choice((1, 2, 16, 17)), "temperature": rng.choice((0, 1))},
                {"regex": grammars.regex(rng)},
                {"json_schema": grammars.schema_text(rng)},
                {"ebnf": grammars.grammar(rng)},
                {"stop": [text(rng)] * 3, "stop_regex": grammars.regex(rng)},
                {"structural_tag": grammars.structural_tag(rng)},
                {"min_new_tokens": 5, "ignore_eos": True, "frequency_penalty": 2},
            )
        ),
    }
    return [one] * rng.choice((1, 2, 128)) if rng.random() < 0.2 else one


def _tensors(rng: random.Random, known: Known) -> list[Any]:
    data = rng.choice(([words(rng, 2)], [words(rng, 2)] * 3, [text(rng)], [1], [[["a"]]], []))
    shape = rng.choice(([1], [len(data)], [1, 1], [2**62], [-1], [], [2**31, 2**31], [1] * 1_000))
    kind = rng.choice(("BYTES", "BYTES", "BYTES", "INT64", "FP32", "BOOL", text(rng)))
    first = {"name": "text_input", "shape": shape, "datatype": kind, "data": data}
    extra = {"name": rng.choice(("max_tokens", "stream", "n", text(rng))), "shape": [1]}
    second = extra | {"datatype": rng.choice(("INT32", "BOOL", "UINT64")), "data": [1]}
    if rng.random() < 0.15:
        first["parameters"] = {"binary_data_size": rng.choice((0, 5, -1, 2**40))}
    return [first, *[second] * rng.choice((0, 1, 1, 63, 64))]


def _batch_requests(rng: random.Random, known: Known) -> list[Any]:
    params = {"model": known.model, "messages": messages.anthropic_messages(rng), "max_tokens": 1}
    ids = rng.choice((("a",), ("a", "a"), [str(n) for n in range(40)], (text(rng),)))
    return [{"custom_id": id, "params": params} for id in ids]


FIELDS: dict[str, Draw] = {
    "allowed_token_ids": lambda rng, known: list(range(rng.choice((1, 2, 100, VOCABULARY + 1)))),
    "content": _texts,
    "conversation": lambda rng, known: known.one(rng, "conv"),
    "documents": _texts,
    "ebnf": lambda rng, known: grammars.grammar(rng),
    "endpoint": lambda rng, known: rng.choice(("/v1/completions", "/v1/chat/completions", "/x")),
    "format": lambda rng, known: rng.choice(("json", grammars.schema(rng), text(rng))),
    "grammar": lambda rng, known: grammars.grammar(rng),
    "guided_choice": lambda rng, known: grammars.choices(rng),
    "guided_grammar": lambda rng, known: grammars.grammar(rng),
    "guided_json": lambda rng, known: grammars.schema(rng),
    "guided_regex": lambda rng, known: grammars.regex(rng),
    "images": lambda rng, known: [messages.image_base64(rng)] * rng.choice((1, 2, 64, 65)),
    "input": _texts,
    "input_file_id": lambda rng, known: known.one(rng, "file"),
    "inputs": _tensors,
    "interp": lambda rng, known: interp(rng, known.results),
    "json_schema": lambda rng, known: grammars.schema(rng),
    "keep_alive": lambda rng, known: rng.choice((-1, "5m", "1e400h", text(rng))),
    "logit_bias": _bias,
    "messages": lambda rng, known: messages.messages(rng, sees=known.sees),
    "model": lambda rng, known: known.model if rng.random() < 0.97 else known.one(rng, "ft"),
    "options": _options,
    "part_ids": lambda rng, known: [known.one(rng, "part")] * rng.choice((1, 2, 1_000)),
    "prediction": lambda rng, known: {"type": "content", "content": messages.content(rng)},
    "previous_response_id": lambda rng, known: known.one(rng, "resp"),
    "prompt": prompt,
    "prompts": _texts,
    "query": _texts,
    "regex": lambda rng, known: grammars.regex(rng),
    "requests": _batch_requests,
    "response_format": lambda rng, known: grammars.response_format(rng),
    "sampling_params": _sampling,
    "stop": lambda rng, known: [text(rng) or "x"] * rng.choice((1, 2, 16, 17)),
    "structured_outputs": lambda rng, known: grammars.structured(rng),
    "text": _texts,
    "text_1": _texts,
    "text_2": _texts,
    "text_input": prompt,
    "tokens": lambda rng, known: prompt(rng, known),
    "tool_choice": lambda rng, known: grammars.tool_choice(rng),
    "tools": lambda rng, known: grammars.tools(rng),
    "training_file": lambda rng, known: known.one(rng, "file"),
    "validation_file": lambda rng, known: known.one(rng, "file"),
} | dict.fromkeys(
    (
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"),
        *("n_predict", "num_predict", "min_tokens", "min_new_tokens"),
    ),
    _length,
)
# Fields that mean something else in the bodies of these paths.
FIELDS_OF_PATH: dict[str, dict[str, Draw]] = {
    "/v1/messages": {
        "messages": lambda rng, known: messages.anthropic_messages(rng),
        "tools": lambda rng, known: grammars.anthropic_tools(rng),
    },
    "/v1/responses": {
        "input": lambda rng, known: messages.response_input(rng),
        "tools": lambda rng, known: grammars.flat_tools(rng),
        "text": lambda rng, known: {"format": grammars.response_format(rng)},
    },
    "/v1/chat/completions/batch": {
        "messages": lambda rng, known: (
            [messages.messages(rng, sees=known.sees)] * rng.choice((1, 2, 128, 129))
        ),
    },
    "/v1/interp/run": {
        "prompt": lambda rng, known: (
            words(rng, rng.choice(LONG_PROMPTS)) if rng.random() < 0.2 else prompt(rng, known)
        ),
        "interp": lambda rng, known: interp(rng, known.results),
    },
    "/tokenize": {"prompt": lambda rng, known: words(rng, 3) * rng.choice((1, 1, 20_000))},
}
FIELDS_OF_PATH["/responses"] = FIELDS_OF_PATH["/v1/responses"]


def draw_of(path: str, name: str) -> Draw | None:
    for start, fields in FIELDS_OF_PATH.items():
        if path.startswith(start) and name in fields:
            return fields[name]
    return FIELDS.get(name)


def example(rng: random.Random, name: str) -> Any:
    """A value from the table of dialects, or None."""
    if name in SAME:
        return SAME[name][0]
    value = ACTS.get(name)
    if isinstance(value, tuple):
        value = value[0]
    if isinstance(value, dict) and value and all(key.startswith("/") for key in value):
        value = rng.choice(list(value.values()))
        value = value[0] if isinstance(value, tuple) else value
    return value
