"""What the application's routes read: the parameters of their paths, queries and bodies."""

import re
from collections.abc import Iterator
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

from engine.core.interp.spec import InterpSpec
from engine.servers.openapi import BODIES, FORMS, OTHER_BODIES, QUERIES

# Fields of bodies that are parsed later, by these models.
PARSED_LATER = {"interp": InterpSpec}


def routes_of(app: FastAPI) -> dict[str, APIRoute]:
    """All routes by method and path."""
    return {
        f"{method} {route.path}": route
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    }


def places_of(name: str, route: APIRoute) -> set[str]:
    """Where a request can name something: `{file_id}`, `?after`, `training_file`, `lora.rank`."""
    method, _, path = name.partition(" ")
    path = route.path_format
    found = {f"{{{each}}}" for each in re.findall(r"\{(\w+)", path)}
    found |= {f"?{each.alias}" for each in route.dependant.query_params}
    if method == "GET" and path in QUERIES:
        found |= {f"?{each}" for each in _fields(QUERIES[path])}
    if method == "POST":
        form = [FORMS[path][0]] if path in FORMS else []
        bodies = [*([BODIES[path]] if path in BODIES else ()), *OTHER_BODIES.get(path, ())]
        found |= {each for kind in (*bodies, *form) for each in _fields(kind)}
    return found


def _fields(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        shown = prefix + (field.alias or name)
        yield shown
        later = (PARSED_LATER[shown],) if shown in PARSED_LATER else ()
        for inner in (*_models(field.annotation), *later):
            yield from _fields(inner, f"{shown}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models(each)
