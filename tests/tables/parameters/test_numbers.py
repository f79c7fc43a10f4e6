"""Every parameter that is a number, at every endpoint that has it, against presets, at its bounds
and beyond them. What is checked is what reaches the backend.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.sampling_fields import SamplingFields
from engine.servers.schema.dialects.parameters import PARAMETERS
from tests.tables.parameters.endpoints import ENDPOINTS, Endpoint
from tests.tables.parameters.numbers import (
    ALIASES,
    LIMIT,
    LIMITS,
    NO_NUMBERS,
    NUMBERS,
    OTHER_BOUNDS,
    PRESET,
    PRESET_LIMIT,
    REFUSED,
    Number,
    expected,
)
from tests.tables.parameters.observed import PLAIN_MODEL, PRESET_MODEL, Seen, Server, nested

EACH = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: each.name)


def numbers_of(endpoint: Endpoint) -> dict[str, Number]:
    """The numbers that the endpoint has, with its own bounds."""
    return {
        name: Number(*OTHER_BOUNDS.get((endpoint.name, name), (each.low, each.high)), *_rest(each))
        for name, each in NUMBERS.items()
        if name in endpoint.kind.model_fields and (endpoint.name, name) not in REFUSED
    }


def _rest(number: Number) -> tuple[Any, ...]:
    return number.default, number.preset, number.value, number.seen


def test_every_number_has_a_row() -> None:
    assert SamplingFields.model_fields.keys() == PRESET.keys() - {"seed"} | {"max_tokens"}
    renamed = {
        name: word.target
        for name, word in PARAMETERS.items()
        if word.target in NUMBERS or word.target == "max_tokens"
    }
    assert renamed == ALIASES | dict.fromkeys(LIMITS.keys() - {"max_tokens"}, "max_tokens")


def differing(seen: Seen, wanted: dict[str, Any]) -> dict[str, Any]:
    """What reached the backend otherwise than it should, with what should have."""
    found = {name: seen.parameter(name) for name in wanted}
    return {name: (found[name], wanted[name]) for name in wanted if found[name] != wanted[name]}


def defaults_of(endpoint: Endpoint) -> dict[str, Any]:
    own = numbers_of(endpoint)
    found = {name: NUMBERS[name].default for name in NUMBERS}
    return found | {name: each for name, each in endpoint.defaults.items() if name in own}


def preset_of() -> dict[str, Any]:
    return {name: each.default for name, each in NUMBERS.items()} | PRESET


def values_of(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    """Requests with all numbers at once: some value, zero or another that turns it off, and both
    ends of what is allowed.
    """
    own = numbers_of(endpoint)
    yield {name: each.value for name, each in own.items()}
    yield {name: min(max(0, each.low), each.high) for name, each in own.items()}
    yield {name: each.low for name, each in own.items()}
    yield {name: each.high for name, each in own.items()} | top_tokens(own)
    if "top_k" in own:
        yield {"top_k": 0, "top_p": 0.5}


def top_tokens(own: dict[str, Number]) -> dict[str, Any]:
    """No answer may be longer than the context."""
    return {"min_tokens": 4} if "min_tokens" in own else {}


@EACH
async def test_values_of_a_request_reach_the_backend_whatever_the_preset_says(
    endpoint: Endpoint,
) -> None:
    server, wrong = Server(), []
    for given, model in itertools.product(values_of(endpoint), (PLAIN_MODEL, PRESET_MODEL)):
        base = preset_of() if model == PRESET_MODEL else defaults_of(endpoint)
        wanted = base | {k: v for name in given for k, v in expected(name, given[name]).items()}
        if given.get("top_p") == 0:
            wanted |= expected("top_p", 0)
        if given.get("seed") is not None and given["seed"] < 0 and draws_seed(endpoint):
            wanted["seed"] = None
        # A request may have its parameters inside an object, as its server's clients send it.
        sent = [given] if not endpoint.inside else [given, nested(endpoint, given)]
        for each in sent:
            found = differing(await server.send(endpoint, limited(endpoint, each), model), wanted)
            if found:
                wrong.append((model, each, found))
    assert not wrong


def limited(endpoint: Endpoint, given: dict[str, Any]) -> dict[str, Any]:
    """The request with room for `min_tokens`."""
    name = endpoint.limit
    return {name: LIMIT} | given if name not in endpoint.needed else given


def draws_seed(endpoint: Endpoint) -> bool:
    """Whether a negative seed asks for a random one, as in llama.cpp and Ollama."""
    return endpoint.name in ("llamacpp", "infill", "ollama chat", "ollama generate")


@EACH
async def test_null_and_a_missing_value_leave_the_preset_or_else_the_default(
    endpoint: Endpoint,
) -> None:
    server, wrong = Server(), []
    for given in ({}, dict.fromkeys(numbers_of(endpoint))):
        for model, wanted in (
            (PLAIN_MODEL, defaults_of(endpoint)),
            (PRESET_MODEL, preset_of()),
        ):
            found = differing(await server.send(endpoint, given, model), wanted)
            wrong += [(model, given, found)] if found else []
    assert not wrong


@EACH
def test_a_number_beyond_its_bounds_or_of_another_type_is_refused_by_its_name(
    endpoint: Endpoint,
) -> None:
    accepted = []
    for name, number in numbers_of(endpoint).items():
        values = [*number.beyond(), *NO_NUMBERS, *([1.5] if number.is_whole else [])]
        for value, spelling in itertools.product(values, spellings(name)):
            given = {spelling: value}
            if endpoint.inside and (name, spelling) == (name, name):
                given = nested(endpoint, given)
            told = refusal(endpoint, given)
            if spelling not in told:
                accepted.append((given, told))
    assert not accepted


def spellings(name: str) -> list[str]:
    return [name, *(alias for alias, target in ALIASES.items() if target == name)]


def refusal(endpoint: Endpoint, given: dict[str, Any]) -> str:
    """The parameter that the error names; empty if there is none."""
    try:
        endpoint.check(given)
    except InvalidRequestError as error:
        return str(error.param)
    return ""


@EACH
async def test_other_names_mean_the_same_and_two_names_may_not_differ(endpoint: Endpoint) -> None:
    server, wrong = Server(), []
    own = numbers_of(endpoint)
    for alias, name in ALIASES.items():
        if name not in own or endpoint.name == "messages":
            continue
        value, others = own[name].value, {own[name].low, *PARAMETERS[alias].off}
        for model, each in itertools.product((PLAIN_MODEL, PRESET_MODEL), (value, *others)):
            wanted = expected(name, each)
            if name == "seed" and each < 0 and draws_seed(endpoint):
                wanted = {"seed": None}
            for given in ({alias: each}, {alias: each, name: each}, {name: None, alias: each}):
                sent = nested(endpoint, given)
                found = differing(await server.send(endpoint, sent, model), wanted)
                wrong += [(model, given, found)] if found else []
        for each in others - {value}:
            told = refusal(endpoint, {name: value, alias: each})
            wrong += [(name, alias, each, told)] if told != alias else []
    assert not wrong


@EACH
async def test_the_length_of_an_answer_is_that_of_the_request_the_preset_or_the_api(
    endpoint: Endpoint,
) -> None:
    server, wrong = Server(), []
    required = endpoint.limit in endpoint.needed
    rows: list[tuple[dict[str, Any], str, Any]] = [({endpoint.limit: LIMIT}, PLAIN_MODEL, LIMIT)]
    rows.append(({endpoint.limit: LIMIT}, PRESET_MODEL, LIMIT))
    if not required:
        of_preset = 16 if endpoint.name == "completions" else PRESET_LIMIT
        rows += [
            (given, model, wanted)
            for given in ({}, {endpoint.limit: None})
            for model, wanted in (
                (PLAIN_MODEL, endpoint.default_limit),
                (PRESET_MODEL, of_preset),
            )
        ]
    takes = "max_tokens" in endpoint.kind.model_fields and endpoint.name != "responses"
    for name, unlimited in LIMITS.items() if takes and not required else ():
        if name == "max_completion_tokens" and endpoint.inside:
            continue
        for model in (PLAIN_MODEL, PRESET_MODEL):
            rows += [({name: each}, model, None) for each in unlimited if allows(endpoint, name)]
            rows.append(({name: LIMIT}, model, LIMIT))
    for given, model, wanted in rows:
        sent = nested(endpoint, given)
        found = differing(await server.send(endpoint, sent, model), {"max_tokens": wanted})
        wrong += [(given, model, found)] if found else []
    assert not wrong


def allows(endpoint: Endpoint, name: str) -> bool:
    """Whether the endpoint takes the values that mean "no limit"."""
    return name != endpoint.limit or name in LIMITS


@EACH
async def test_a_stream_gets_the_same_numbers(endpoint: Endpoint) -> None:
    if endpoint.name in ("batch chat", "kserve"):
        return  # the first has no streams, and the second another route for them
    server = Server()
    given = limited(endpoint, {name: each.value for name, each in numbers_of(endpoint).items()})
    found = [
        (await server.send(endpoint, given | {"stream": streams}, PRESET_MODEL)).requests[0]
        for streams in (False, True)
    ]
    assert found[0].context.params == found[1].context.params
