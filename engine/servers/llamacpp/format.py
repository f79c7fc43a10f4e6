"""Formats the backend's events as llama.cpp's JSON: whole answers, and the events of a stream."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core.errors import EngineError
from engine.core.interfaces.backend import (
    FinishEvent,
    ModelCard,
    TextEvent,
    TokenText,
    TopLogprob,
    UsageEvent,
)
from engine.core.interfaces.request import (
    NUMBER_FIELDS,
    SAMPLERS,
    USUAL_SAMPLERS,
    SamplingParams,
)
from engine.servers.http.errors import llamacpp_error_body
from engine.servers.openai.format import Choice
from engine.servers.openai.reports import timings
from engine.servers.schema.dialects.parameters import PARAMETERS
from engine.servers.serving.event_pump import EventPump, OutputEvent

_encode = msgspec.json.Encoder().encode
RANDOM_SEED = 2**32 - 1  # llama.cpp's number for a seed that is chosen at random
# Parameters that have the same names in llama.cpp.
_SAME_NAMES = (
    *(name for name in NUMBER_FIELDS if "llamacpp" in PARAMETERS[name].dialects),
    *("dry_sequence_breakers", "stop"),
)


def settings_body(
    params: SamplingParams, limit: int | None, eos_id: int | None = None
) -> dict[str, Any]:
    """llama.cpp's `generation_settings`. `limit` is the max number of tokens that the client asked
    for.
    """
    excluded = [eos_id] if params.ignore_eos and eos_id is not None else []
    biases: Mapping[int, float] = params.logit_bias | dict.fromkeys(excluded, -math.inf)
    num_tokens = -1 if limit is None else limit
    return {
        "seed": RANDOM_SEED if params.seed is None else params.seed,
        **{name: getattr(params, name) for name in _SAME_NAMES},
        "repeat_penalty": params.repetition_penalty,
        "max_tokens": num_tokens,
        "n_predict": num_tokens,
        # JSON has no infinity; llama.cpp sends null for it.
        "logit_bias": [
            {"token": token, "bias": None if math.isinf(bias) else bias}
            for token, bias in biases.items()
        ],
        "n_probs": params.logprobs or 0,
        "samplers": params.samplers or (SAMPLERS if params.has_chain else USUAL_SAMPLERS),
        "lora": [],
    }


def probabilities(tokens: Sequence[TokenText]) -> list[dict[str, Any]]:
    """llama.cpp's `completion_probabilities`."""
    return [
        _probability(token) | {"top_logprobs": [_probability(each) for each in token.top]}
        for token in tokens
    ]


def _probability(token: TokenText | TopLogprob) -> dict[str, Any]:
    return {
        "id": token.token_id,
        "token": token.token,
        "bytes": list(token.token_bytes),
        # JSON has no infinity. llama.cpp sends the lowest number of its type for it.
        "logprob": max(token.logprob, -3.4028234663852886e38),
    }


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for, as the answers tell it."""

    card: ModelCard
    settings: dict[str, Any]
    prompts: tuple[str, ...]  # the texts of the prompts, with the names of control tokens
    num_choices: int  # of each prompt
    returns_tokens: bool = False
    writes_nothing: bool = False
    response_fields: tuple[str, ...] = ()


def answer(
    asked: Asked,
    index: int,
    choice: Choice,
    num_tokens: int,
    usage: UsageEvent,
    *,
    is_streamed: bool = False,
) -> dict[str, Any]:
    """The body of one answer, or the last event of its stream. `usage` is that of its prompt. If
    the answer was streamed, its text and tokens are left out.
    """
    finish = choice.finish or FinishEvent(index, "stop")
    if asked.writes_nothing:
        num_tokens = 0
    is_shown = not (is_streamed or asked.writes_nothing)
    is_full = usage.prompt_tokens + num_tokens >= asked.card.max_model_len
    body: dict[str, Any] = {
        "index": index,
        "content": choice.text if is_shown else "",
        "tokens": choice.token_ids if is_shown and asked.returns_tokens else [],
        "id_slot": index,
        "stop": True,
        "model": asked.card.id,
        "tokens_predicted": num_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "generation_settings": asked.settings,
        "prompt": asked.prompts[index // asked.num_choices],
        "has_new_line": "\n" in choice.text,
        "truncated": finish.reason == "length" and is_full,
        **stopping(finish),
        "tokens_cached": usage.prompt_tokens + max(num_tokens - 1, 0),
        "timings": timings(msgspec.structs.replace(usage, completion_tokens=num_tokens)),
    }
    if choice.tokens and is_shown:
        body["completion_probabilities"] = probabilities(choice.tokens)
    return selected(body, asked.response_fields)


def stopping(finish: FinishEvent) -> dict[str, str]:
    word = finish.stop_reason if isinstance(finish.stop_reason, str) else ""
    kind = "limit" if finish.reason == "length" else "word" if word else "eos"
    return {"stop_type": kind, "stopping_word": word}


def selected(body: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The fields with these names, or all if there are no names. `a/b` is the field `b` in `a`."""
    if not names:
        return body
    found: dict[str, Any] = {}
    for name in names:
        value: Any = body
        for key in name.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found


class NativeStream:
    """Events of a streamed `/completion`. The last event of each answer tells how it ended."""

    def __init__(self, asked: Asked, pump: EventPump, usages: Sequence[UsageEvent]) -> None:
        self._asked = asked
        self._pump = pump
        self._usages = usages
        self._choices = [Choice() for _ in pump.choice_tokens]

    def opening(self) -> bytes:
        return b""

    def blank(self, choice: int) -> bytes:
        """A chunk without text."""
        body = {"index": choice, "content": "", "tokens": (), "stop": False, "id_slot": choice}
        return b"data: " + _encode(body) + b"\n\n"

    def chunk(self, event: OutputEvent) -> bytes:
        self._choices[event.choice].add(event)
        if not isinstance(event, TextEvent) or self._asked.writes_nothing:
            return b""
        body: dict[str, Any] = {
            "index": event.choice,
            "content": event.text,
            "tokens": event.token_ids,
            "stop": False,
            "id_slot": event.choice,
            "tokens_predicted": len(self._choices[event.choice].token_ids),
        }
        if event.logprobs:
            body["completion_probabilities"] = probabilities(event.logprobs)
        return b"data: " + _encode(body) + b"\n\n"

    def closing(self, usage: UsageEvent) -> bytes:
        ends = answers(self._asked, self._choices, self._pump, self._usages, is_streamed=True)
        return b"".join(b"data: " + _encode(each) + b"\n\n" for each in ends)

    def failure(self, error: EngineError) -> bytes:
        return b"data: " + llamacpp_error_body(error) + b"\n\n"


def answers(
    asked: Asked,
    choices: Sequence[Choice],
    pump: EventPump,
    usages: Sequence[UsageEvent],
    *,
    is_streamed: bool = False,
) -> list[dict[str, Any]]:
    """The body of each answer. `usages` has the usage of each prompt, if there are several. It is
    complete at the end of the stream.
    """
    return [
        answer(
            asked,
            index,
            choice,
            pump.choice_tokens[index],
            usages[index // asked.num_choices] if usages else pump.usage,
            is_streamed=is_streamed,
        )
        for index, choice in enumerate(choices)
    ]
