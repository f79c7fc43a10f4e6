"""Every numeric field of every request, from the server's OpenAPI description, with values at and
beyond its bounds.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema

# Raw JSON text, because no encoder would write some of these.
NEVER = ("NaN", "Infinity", "-Infinity", '"1"', "true", "1e308", "-1e308", "1e999", "9" * 5000)
WHOLE = (-1, 0, 2**31, 2**63, 2**64, -(2**31), -(2**63) - 1)
_PLACEHOLDER = "the number goes here"


@dataclass(frozen=True, slots=True)
class Number:
    """A numeric field: its route, its location in the body or query, and its bounds."""

    method: str
    path: str
    place: tuple[str | int, ...]  # an integer stands for the only member of a list
    schema: dict[str, Any]
    whole: dict[str, Any]  # the schema of the whole body, or of the parameter
    in_query: bool = False

    @property
    def is_bounded(self) -> bool:
        low, high = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
        keys = self.schema.keys()
        return bool(keys & {"const", "enum"}) or bool(keys & low and keys & high)

    def values(self) -> Iterator[str]:
        """The values to try, as JSON text."""
        edges: set[float] = {*WHOLE}
        if "minimum" in self.schema:
            edges |= {self.schema["minimum"], self.schema["minimum"] - 1}
        if "maximum" in self.schema:
            edges |= {self.schema["maximum"], self.schema["maximum"] + 1}
        if self.schema["type"] == "integer":
            edges |= {1.5}
        yield from map(json.dumps, sorted(edges))
        yield from (text for text in NEVER if not (self.in_query and text == '"1"'))

    def allows(self, body: bytes) -> bool:
        """Whether a body or parameter is valid by the server's description."""
        try:
            value = json.loads(body, parse_constant=_refuse)
        except ValueError:
            return False
        return jsonschema.Draft202012Validator(self.whole).is_valid(value)

    def body(self, least: dict[str, Any], text: str) -> bytes:
        """The minimal body `least` with this value."""
        value: Any = _PLACEHOLDER
        for key in reversed(self.place[1:]):
            value = [value] if isinstance(key, int) else {key: value}
        encoded = json.dumps(least | {str(self.place[0]): value})
        return encoded.replace(json.dumps(_PLACEHOLDER), text).encode()


def numbers_of(description: dict[str, Any]) -> Iterator[Number]:
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            for each in operation.get("parameters", ()):
                whole = each["schema"]
                for place, schema in _numbers(description, whole, (each["name"],)):
                    yield Number(method, path, place, schema, whole, in_query=True)
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                whole = content["application/json"]["schema"]
                for place, schema in _numbers(description, whole, ()):
                    everything = whole | {"components": description["components"]}
                    yield Number(method, path, place, schema, everything)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _numbers(
    description: dict[str, Any], schema: dict[str, Any], place: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from _numbers(description, description["components"]["schemas"][name], place)
    if schema.get("type") in ("integer", "number"):
        yield place, schema
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _numbers(description, part, place)
    for name, part in schema.get("properties", {}).items():
        yield from _numbers(description, part, (*place, name))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _numbers(description, schema["additionalProperties"], (*place, "7"))
    if isinstance(schema.get("items"), dict):
        yield from _numbers(description, schema["items"], (*place, 0))
