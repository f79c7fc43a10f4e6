"""Proves facts about schemas: that some value matches a schema, or that no value matches two
schemas at once. The schemas have the form to which `schema_rules` rewrites them. A `Node` is one
that is being rewritten.

`Satisfiable` ignores some constraints, so it may accept a schema that no value matches. `Disjoint`
says true only if it found a proof, so it may say false about schemas that are disjoint.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

Schema = dict[str, Any] | bool
Definitions = dict[str, Schema]

REF_PREFIX = "#/$defs/"
# Max steps of all proofs about one document together. Without this limit, the proofs could take
# exponential time.
MAX_PROOF_STEPS = 50_000
MAX_PROOF_DEPTH = 50
MANY_CASES = 10**9  # numbers of cases are not counted further

# Keywords that contain schemas. Their values are objects of schemas (MAP), lists of schemas (LIST)
# or single schemas (PART).
MAP_KEYWORDS = ("properties", "patternProperties")
LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems")
PART_KEYWORDS = ("items", "additionalProperties")

ALL_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def target(reference: str) -> str:
    """The key in `$defs` of the definition that a rewritten `$ref` points to."""
    return reference.removeprefix(REF_PREFIX)


def with_parts(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """A copy of the schema with `change` applied to each direct subschema."""
    if isinstance(schema, bool):
        return schema
    changed = dict(schema)
    for keyword in schema.keys() & {*MAP_KEYWORDS}:
        changed[keyword] = {name: change(part) for name, part in schema[keyword].items()}
    for keyword in schema.keys() & {*LIST_KEYWORDS}:
        changed[keyword] = [change(part) for part in schema[keyword]]
    for keyword in schema.keys() & {*PART_KEYWORDS}:
        changed[keyword] = change(schema[keyword])
    return changed


def references(schema: Schema) -> set[str]:
    """The keys in `$defs` of all definitions that a rewritten schema references."""
    found: set[str] = set()

    def collect(part: Schema) -> Schema:
        if isinstance(part, dict) and "$ref" in part:
            found.add(target(part["$ref"]))
        return with_parts(part, collect)

    collect(schema)
    return found


def has_loop(definitions: Definitions) -> bool:
    """Whether a definition applies itself to the same value, directly or through other definitions.
    Validators would not terminate on such a schema.
    """
    waits_for = {key: _applied(schema) for key, schema in definitions.items()}
    users: dict[str, list[str]] = {key: [] for key in definitions}
    for key, used in waits_for.items():
        for each in used:
            users[each].append(key)
    ready = [key for key, used in waits_for.items() if not used]
    num_ordered = 0
    while ready:
        num_ordered += 1
        done = ready.pop()
        for user in users[done]:
            waits_for[user].discard(done)
            if not waits_for[user]:
                ready.append(user)
    return num_ordered < len(definitions)


def _applied(schema: Schema) -> set[str]:
    """The definitions that a schema applies to the value itself, not to a part of the value."""
    if isinstance(schema, bool):
        return set()
    found = {target(schema["$ref"])} if "$ref" in schema else set()
    for keyword in ("allOf", "anyOf", "oneOf"):
        for part in schema.get(keyword, ()):
            found |= _applied(part)
    return found


def same_value_key(value: Any) -> str:
    """A key that is equal for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(same_value_key(item) for item in value) + "]"
    if isinstance(value, dict):
        items = sorted((json.dumps(key), same_value_key(item)) for key, item in value.items())
        return "{" + ",".join(f"{key}:{item}" for key, item in items) + "}"
    return json.dumps(value)


def most_cases(schemas: Iterable[Schema]) -> int:
    """The largest number of combinations of branches that apply to one value, in schemas or their
    parts. A reference counts as one branch.
    """
    largest = 1

    def num_cases(schema: Schema) -> int:
        nonlocal largest
        if isinstance(schema, bool):
            return 1
        number = sum(num_cases(part) for part in schema.get("anyOf", (True,)))
        for part in schema.get("allOf", ()):
            number = min(number * num_cases(part), MANY_CASES)
        largest = max(largest, number)
        inner = {keyword: schema[keyword] for keyword in schema.keys() - {"allOf", "anyOf"}}
        with_parts(inner, lambda part: num_cases(part) > 0)
        return number

    for schema in schemas:
        num_cases(schema)
    return largest


class Node:
    """A schema while it is rewritten. `source` has the keywords of the client's schema, `output`
    those of the schema for llguidance.
    """

    def __init__(self, source: dict[str, Any], path: str) -> None:
        self.source = source
        self.path = path
        self.output: dict[str, Any] = {}

    def demand(self, *schemas: Schema) -> None:
        self.output.setdefault("allOf", []).extend(schemas)

    def narrow(self, keyword: str, bound: float) -> None:
        """Set the keyword `minimum` or `maximum` to `bound`, unless its bound is already
        tighter.
        """
        tighter = max if keyword == "minimum" else min
        self.output[keyword] = tighter(bound, self.output.get(keyword, bound))

    def match(self, expression: str) -> None:
        if "pattern" in self.output:
            self.demand({"pattern": expression})
        else:
            self.output["pattern"] = expression


class Satisfiable:
    """Finds the definitions that some finite value matches. A definition that requires a value of
    itself, such as a list node with a required `next`, matches none. Constraints on numbers and
    strings are ignored.
    """

    def __init__(self, definitions: Definitions) -> None:
        users: dict[str, list[str]] = {key: [] for key in definitions}
        for key, schema in definitions.items():
            for used in references(schema):
                users[used].append(key)
        self._matched: set[str] = set()
        pending = list(definitions)
        while pending:
            key = pending.pop()
            if key not in self._matched and self.admits(definitions[key]):
                self._matched.add(key)
                pending += users[key]

    def admits(self, schema: Schema) -> bool:
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and target(schema["$ref"]) not in self._matched:
            return False
        if not all(self.admits(part) for part in schema.get("allOf", ())):
            return False
        if "anyOf" in schema and not any(self.admits(part) for part in schema["anyOf"]):
            return False
        types = types_of(schema)
        if types <= {"object"}:
            return self._admits_object(schema)
        return not types <= {"array"} or self._admits_array(schema)

    def prune(self, schema: Schema) -> Schema:
        """A copy of the schema with `false` in place of every reference to an unsatisfiable
        definition.
        """
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if reference is not None and target(reference) not in self._matched:
            return False
        return with_parts(schema, self.prune)

    def _admits_object(self, schema: dict[str, Any]) -> bool:
        properties = schema.get("properties", {})
        return all(self.admits(properties.get(name, True)) for name in schema.get("required", ()))

    def _admits_array(self, schema: dict[str, Any]) -> bool:
        first = schema.get("prefixItems", [])
        least = schema.get("minItems", 0)
        rest = least <= len(first) or self.admits(schema.get("items", True))
        return rest and all(self.admits(part) for part in first[:least])


def types_of(schema: dict[str, Any]) -> frozenset[str]:
    """The JSON types that a schema's own keywords allow. If "number" is allowed, so is
    "integer".
    """
    named = schema.get("type", ALL_TYPES)
    types = frozenset([named] if isinstance(named, str) else named)
    if "number" in types:
        types |= {"integer"}
    values = _values(schema)
    if values is None:
        return types
    return types & {_type_of(value) for value in values}


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    names = {type(None): "null", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


class Disjoint:
    """Proves that no value matches two schemas at once."""

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions
        self._steps = 0

    def all_pairs(self, schemas: list[Schema]) -> bool:
        return all(
            self._proved(one, other, 0)
            for index, one in enumerate(schemas)
            for other in schemas[index + 1 :]
        )

    def _proved(self, one: Schema, other: Schema, depth: int) -> bool:
        self._steps += 1
        if self._steps > MAX_PROOF_STEPS or depth > MAX_PROOF_DEPTH:
            return False
        if one is False or other is False:
            return True
        if isinstance(one, bool) or isinstance(other, bool):
            return False
        return (
            not types_of(one) & types_of(other)
            or self._by_values(one, other)
            or self._by_properties(one, other, depth + 1)
            or self._by_parts(one, other, depth + 1)
            or self._by_parts(other, one, depth + 1)
        )

    def _by_parts(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        if "$ref" in one and self._proved(self._definitions[target(one["$ref"])], other, depth):
            return True
        for keyword in ("anyOf", "oneOf"):
            parts = one.get(keyword)
            if parts and all(self._proved(part, other, depth) for part in parts):
                return True
        return any(self._proved(part, other, depth) for part in one.get("allOf", ()))

    def _by_values(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        mine, theirs = _values(one), _values(other)
        if mine is None or theirs is None:
            return False
        self._steps += len(mine) + len(theirs)
        return {same_value_key(value) for value in mine}.isdisjoint(
            same_value_key(value) for value in theirs
        )

    def _by_properties(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Whether at least one of the schemas requires a property, and it is proved that no value
        of this property matches both schemas.
        """
        if not types_of(one) & types_of(other) <= {"object"}:
            return False
        names = {*one.get("required", ()), *other.get("required", ())}
        return any(
            self._proved(_property(one, name), _property(other, name), depth)
            for name in sorted(names)
        )


def _values(schema: dict[str, Any]) -> list[Any] | None:
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


def _property(schema: dict[str, Any], name: str) -> Schema:
    properties: dict[str, Schema] = schema.get("properties", {})
    if name in properties or "patternProperties" in schema:
        return properties.get(name, True)
    rest: Schema = schema.get("additionalProperties", True)
    return rest
