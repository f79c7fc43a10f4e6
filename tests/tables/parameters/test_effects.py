"""Every parameter that is no number has its documented effect, at every endpoint that has it; and a
value of another type is refused by its name.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import FinishEvent, TextEvent
from engine.servers.schema.body import off_values
from tests.support.fakes.fake_backend import reasoning_script
from tests.tables.parameters.effects import OWN, SHARED, Effect
from tests.tables.parameters.endpoints import ENDPOINTS, Endpoint
from tests.tables.parameters.numbers import LIMITS, NUMBERS
from tests.tables.parameters.observed import Seen, Server

EACH = pytest.mark.parametrize(
    "endpoint", [each for each in ENDPOINTS if each.name in OWN], ids=lambda each: each.name
)
LENGTHS = {*LIMITS, "max_output_tokens"}
# What the backend answers, for parameters that show in an answer of another kind.
SCRIPTS = {
    "include_reasoning": reasoning_script(["hm"], ["yes"]),
    "return_tokens": [TextEvent(0, "é", 1, token_ids=(7,)), FinishEvent(0, "stop")],
}


def fields_of(endpoint: Endpoint) -> Iterator[str]:
    """The parameters that an endpoint follows and that are no numbers."""
    refused = off_values(endpoint.kind)
    for name, field in endpoint.kind.model_fields.items():
        if name not in NUMBERS and name not in LENGTHS and name not in refused:
            yield field.alias or name


def effects_of(endpoint: Endpoint) -> dict[str, Effect]:
    known = SHARED | OWN[endpoint.name]
    return {name: known[name] for name in fields_of(endpoint) if name in known}


@EACH
def test_every_parameter_has_an_effect(endpoint: Endpoint) -> None:
    missing = set(fields_of(endpoint)) - effects_of(endpoint).keys()
    assert not missing, "say in effects.py what these do"


@EACH
async def test_every_parameter_does_what_it_says(endpoint: Endpoint) -> None:
    server, wrong = Server(), {}
    server.backend.set_card(template_options=("enable_thinking", "documents"))
    server.backend.cards += Server().backend.cards[1:]
    for name, effect in effects_of(endpoint).items():
        server.backend.script = SCRIPTS.get(name)
        found = await server.send(endpoint, effect.needs | {name: effect.value})
        server_seen = observed(server, found)
        if effect.seen:
            problems = [
                (place, at(server_seen, place), wanted)
                for place, wanted in effect.seen.items()
                if not agrees(at(server_seen, place), wanted)
            ]
        else:
            without = observed(server, await server.send(endpoint, effect.needs))
            problems = [] if plain(server_seen) != plain(without) else [("nothing", found.text, "")]
        if problems:
            wrong[name] = problems
    assert not wrong


def observed(server: Server, found: Seen) -> dict[str, Any]:
    record = next(iter(server.app.state.services.history.newest(None)), None)
    request = found.requests[0] if found.requests else None
    return {
        "status": found.status,
        "type": found.type,
        "warnings": found.warnings,
        "answer": found.json,
        "request": request,
        "context": None if request is None else request.context,
        "params": None if request is None else request.context.params,
        "record": record,
    }


def plain(seen: dict[str, Any]) -> Any:
    """What can be compared between two requests."""
    params = seen["params"]
    answer = seen["answer"]
    if isinstance(answer, dict):
        answer = {name: each for name, each in answer.items() if name not in VARYING}
    request = seen["request"]
    asked = (
        None if request is None else {n: getattr(request, n) for n in ASKED if hasattr(request, n)}
    )
    return seen["status"], seen["type"], seen["warnings"], params, answer, asked


VARYING = ("id", "created", "created_at", "request_id", "timings", "meta_info")
ASKED = ("messages", "prompt", "template_options", "add_generation_prompt", "tools")


def at(seen: dict[str, Any], place: str) -> Any:
    found: Any = seen
    for name in place.split("."):
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, (list, tuple)):
            found = found[int(name)] if int(name) < len(found) else None
        else:
            found = getattr(found, name, None)
    return found


def agrees(found: Any, wanted: Any) -> bool:
    return bool(wanted(found)) if callable(wanted) else found == wanted


@EACH
def test_a_value_of_another_type_is_refused_by_its_name(endpoint: Endpoint) -> None:
    accepted = {}
    for name, effect in effects_of(endpoint).items():
        for value in others_than(effect.value):
            try:
                endpoint.check(effect.needs | {name: value})
            except InvalidRequestError as error:
                if str(error.param).split(".")[0].split("[")[0] == name:
                    continue
                accepted[name] = (value, error.param)
            else:
                accepted[name] = (value, None)
    assert accepted == {}


def others_than(value: Any) -> list[Any]:
    """Values that no parameter of this type accepts."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [[], {}]
    return [5.5, *(["true", 1] if isinstance(value, bool) else [])]
