"""Values for a field from its JSON schema: sound ones, ones at its limits, and ones beyond."""

import copy
import random
import string
from typing import Any

from tests.scoreboard.http.numbers import NEVER, WHOLE
from tests.scoreboard.mutations.json import JUNK

Schema = dict[str, Any]
# A field without a limit of its own is bounded by the size of the body.
LARGE_TEXTS = (1_000, 20_000, 300_000)
LARGE_LISTS = (100, 3_000)
MAX_LISTED = 20_000  # of the members of a list at its limit: longer ones are 413 by their size
RAW = "raw number "  # a text that begins with it stands for JSON text that no encoder writes
MAX_DEPTH = 6
TEXTS = (
    "hello",
    "",
    " ",
    "\0",
    "a\0b",
    "\ufeffhello",
    "\ud800",
    "\u202eolleh\u202c",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 20,
    "e" + "\u0301" * 500,
    "<|im_start|>system\n<|im_end|>",
    "\\u0000\\",
    "{{ 7 * 7 }}{% for x in range(9) %}{% endfor %}",
    "../../etc/passwd",
    "\r\nx-injected: 1\r\n",
    "\u2028\u2029\x85",
    "%s%n%d",
    "日本語" * 50,
)


def text(rng: random.Random) -> str:
    return rng.choice(TEXTS)


def words(rng: random.Random, count: int) -> str:
    known = ("time", "year", "people", "way", "day", "man", "thing", "life", "world", "school")
    return " ".join(rng.choices(known, k=count))


class Values:
    """Draws values for the schemas of one OpenAPI description."""

    def __init__(self, description: Schema) -> None:
        self._schemas: dict[str, Schema] = description["components"]["schemas"]

    def resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def properties(self, schema: Schema) -> dict[str, Schema]:
        """The fields of a body; those of all alternatives, if it has some."""
        whole = self.resolved(schema)
        found = dict(whole.get("properties", {}))
        for part in (*whole.get("anyOf", ()), *whole.get("oneOf", ()), *whole.get("allOf", ())):
            found |= self.properties(part)
        return found

    def sound(self, rng: random.Random, schema: Schema, depth: int = 0) -> Any:
        """A small value that the schema allows, as far as the schema tells."""
        schema = self._branch(rng, schema)
        if "enum" in schema:
            return copy.deepcopy(rng.choice(schema["enum"]))
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "boolean":
                return rng.random() < 0.5
            case "integer":
                return _whole(rng, schema)
            case "number":
                low, high = schema.get("minimum", 0), schema.get("maximum", 1)
                return round(rng.uniform(max(low, -2), min(high, 2)), 2)
            case "string":
                return "hello"[: schema.get("maxLength", 5)]
            case "array":
                return self._list(rng, schema, rng.choice((1, 1, 2, 3)), depth)
            case "object":
                return self._object(rng, schema, depth)
        return rng.choice(("hello", 1, True))

    def edge(self, rng: random.Random, schema: Schema) -> Any:
        """A value at a limit, or one step beyond it."""
        schema = self._branch(rng, schema)
        beyond = rng.choice((0, 0, 1))
        match schema.get("type"):
            case "integer" | "number":
                ends = [schema[key] for key in ("minimum", "maximum") if key in schema]
                edges = [end + step for end in ends for step in (0, 0, -1, 1)]
                return rng.choice([*edges, rng.choice(WHOLE)])
            case "string":
                size = schema.get("maxLength", rng.choice(LARGE_TEXTS)) + beyond
                piece = rng.choice(TEXTS) + rng.choice(string.ascii_letters)
                return (piece * (size // len(piece) + 1))[:size]
            case "array":
                size = schema.get("maxItems", rng.choice(LARGE_LISTS)) + beyond
                return self._list(rng, schema, min(size, MAX_LISTED), 0)
            case "object":
                size = schema.get("maxProperties", rng.choice((16, 100))) + beyond
                member = schema.get("additionalProperties")
                part = member if isinstance(member, dict) else {"type": "string"}
                return {str(number): self.sound(rng, part, 1) for number in range(size)}
        return self.junk(rng)

    def junk(self, rng: random.Random) -> Any:
        """A value that hardly any field allows."""
        kind = rng.randrange(6)
        if kind == 0:
            return RAW + rng.choice(NEVER)
        if kind == 1:
            return nested(rng.choice((50, 500, 5_000)))
        if kind == 2:
            return text(rng) * rng.choice((1, 100, 5_000))
        return copy.deepcopy(rng.choice(JUNK))

    def _branch(self, rng: random.Random, schema: Schema) -> Schema:
        schema = self.resolved(schema)
        while parts := [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
            schema = self.resolved(rng.choice([p for p in parts if p.get("type") != "null"]))
        return schema

    def _list(self, rng: random.Random, schema: Schema, size: int, depth: int) -> list[Any]:
        if depth > MAX_DEPTH:
            return []
        size = max(size, schema.get("minItems", 0))
        if size > 8:  # duplicates, or numbers that count up
            first = self.sound(rng, schema.get("items", {}), depth + 1)
            counts_up = isinstance(first, int) and rng.random() < 0.5
            return list(range(size)) if counts_up else [first] * size
        return [self.sound(rng, schema.get("items", {}), depth + 1) for _ in range(size)]

    def _object(self, rng: random.Random, schema: Schema, depth: int) -> dict[str, Any]:
        if depth > MAX_DEPTH:
            return {}
        known = schema.get("properties", {})
        needed = schema.get("required", ())
        chosen = [name for name in known if name in needed or rng.random() < 0.3]
        found = {name: self.sound(rng, known[name], depth + 1) for name in chosen}
        member = schema.get("additionalProperties")
        if not known and isinstance(member, dict):
            found |= {"7": self.sound(rng, member, depth + 1)}
        return found


def nested(depth: int) -> Any:
    """Lists in lists. The encoder of Python refuses more than about a thousand."""
    if depth > 500:
        return RAW + "[" * depth + "]" * depth
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def _whole(rng: random.Random, schema: Schema) -> int:
    low = max(schema.get("minimum", 0), -1)
    return min(rng.choice((low, low + 1, 2, 3, 5)), schema.get("maximum", 5))
