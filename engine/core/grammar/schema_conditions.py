"""Rewrites the keywords of a schema that are conditions, such as `if`, `contains` and
`propertyNames`, to unions of schemas without conditions.

Every value that matches the union meets the condition. The reverse is not always true: an item that
`contains` demands must be one of the first items.
"""

import json
from collections.abc import Callable
from itertools import combinations, permutations
from math import ceil, comb, floor, perm
from typing import Any, NamedTuple

from engine.core.grammar import schema_values as values
from engine.core.grammar.regex_dialect import MAX_REPEAT, any_text
from engine.core.grammar.schema_logic import ALL_TYPES, Schema, same_value_key, types_of
from engine.core.grammar.schema_negation import (
    MAX_PLACES,
    Part,
    Rewriter,
    all_of,
    any_of,
    contains_range,
    excluding,
    having,
    without,
)
from engine.core.grammar.schema_values import STRING_FORMATS, is_annotation

# Max number of cases of one condition, each of which is an alternative of the grammar.
MAX_CASES = 64
# Max number of arrays without repetition that are listed. Five values have 326.
MAX_ARRAYS = 400
MAX_REFERENCES = 50  # max references that are followed from one schema
_TYPES_OF_FEW: dict[str, list[Any]] = {'"boolean"': [False, True], '"null"': [None]}
NO_NAMES: dict[str, Any] = {"properties": {}, "additionalProperties": False}


def if_then_else(rewriter: Rewriter, source: dict[str, Any], path: str) -> Schema:
    if "then" not in source and "else" not in source:
        return True
    condition, matched = source["if"], f"{path}.if"
    then = rewriter.schema(source.get("then", True), f"{path}.then")
    otherwise = rewriter.schema(source.get("else", True), f"{path}.else")
    return any_of(
        [
            all_of([rewriter.schema(condition, matched), then]),
            all_of([rewriter.negated(condition, matched), otherwise]),
        ]
    )


class _Comparison(NamedTuple):
    """An `if` that compares a property with strings."""

    name: str
    constants: list[str]
    matches_absence: bool  # whether objects without the property match
    matches_others: bool  # whether values that are no objects match


def joined(rewriter: Rewriter, parts: list[Part]) -> tuple[list[Part], list[Schema]]:
    """The parts of an `allOf` that stay as they are, and a schema for each property that several
    other parts compare with strings.

    Each `if` alone has two cases, so n of them have 2**n combinations. Together they have one case
    for each string, one for all other values of the property, and one for values without it.
    """
    comparisons = [_comparison(schema) for schema, _ in parts]
    names = [each.name for each in comparisons if each is not None]
    rest: list[Part] = []
    groups: dict[str, list[tuple[_Comparison, Part]]] = {}
    for comparison, part in zip(comparisons, parts, strict=True):
        if comparison is None or names.count(comparison.name) < 2:
            rest.append(part)
        else:
            groups.setdefault(comparison.name, []).append((comparison, part))
    return rest, [_compared(rewriter, name, group) for name, group in groups.items()]


def _comparison(schema: object) -> _Comparison | None:
    """None if a schema has anything else than such an `if`."""
    condition = _asserted(schema).pop("if", None)
    if _asserted(schema).keys() - {"if", "then", "else"}:
        return None
    asserted = _asserted(condition)
    properties = asserted.get("properties")
    if asserted.keys() - {"properties", "required", "type"} or not isinstance(properties, dict):
        return None
    name = next(iter(properties), "")
    compared = _asserted(properties.get(name))
    kind = compared.pop("type", "string")
    constants = [compared["const"]] if "const" in compared else compared.get("enum")
    if not isinstance(constants, list) or not all(isinstance(each, str) for each in constants):
        return None
    is_plain = (
        len(properties) == len(compared) == 1
        and kind == "string"
        and asserted.get("type", "object") == "object"
        and asserted.get("required", [name]) in ([name], [])
    )
    if not is_plain:
        return None
    return _Comparison(
        name,
        constants,
        matches_absence=not asserted.get("required"),
        matches_others="type" not in asserted,
    )


def _asserted(schema: object) -> dict[str, Any]:
    if not isinstance(schema, dict):
        return {}
    return {keyword: value for keyword, value in schema.items() if not is_annotation(keyword)}


def _compared(rewriter: Rewriter, name: str, group: list[tuple[_Comparison, Part]]) -> Schema:
    path = group[0][1][1]
    branches: list[tuple[_Comparison, Schema, Schema]] = []
    for comparison, (schema, place) in group:
        assert isinstance(schema, dict)
        then, otherwise = (
            rewriter.define(rewriter.schema(schema.get(keyword, True), f"{place}.{keyword}"), place)
            for keyword in ("then", "else")
        )
        branches.append((comparison, then, otherwise))
    constants = list(
        dict.fromkeys(
            each for one, *_ in branches for each in one.constants if values.is_writable(each)
        )
    )
    rewriter.spend(len(branches) * sum(len(constant) + 10 for constant in constants), path)

    def case(subject: Schema, matches: Callable[[_Comparison], bool]) -> Schema:
        chosen = [then if matches(one) else otherwise for one, then, otherwise in branches]
        return all_of([subject, *chosen])

    def equal(constant: str) -> Schema:
        return case(having(name, {"enum": [constant]}), lambda one: constant in one.constants)

    others: Schema = {"type": sorted(ALL_TYPES - {"string", "integer"})}
    cases = [equal(constant) for constant in constants]
    others = any_of([others, excluding(rewriter, constants, path)])
    cases.append(case(having(name, others), lambda one: False))
    cases.append(case(without(name), lambda one: one.matches_absence))
    no_object = {"type": sorted(ALL_TYPES - {"object", "integer"})}
    cases.append(case(no_object, lambda one: one.matches_others))
    return any_of(cases)


def negation(rewriter: Rewriter, source: dict[str, Any], path: str) -> Schema:
    return rewriter.negated(source["not"], f"{path}.not")


def _others(source: dict[str, Any], kind: str) -> Schema:
    """The values of other types than `kind` that a schema allows. Conditions on objects or arrays
    don't constrain them.
    """
    types = types_of({"type": source["type"]}) if "type" in source else ALL_TYPES
    others = types - {kind}
    if "number" in others:
        others -= {"integer"}
    return {"type": sorted(others)} if others else False


def dependent_required(rewriter: Rewriter, source: dict[str, Any], path: str) -> Schema:
    needed = source["dependentRequired"]
    if not isinstance(needed, dict):
        rewriter.fail(path, "'dependentRequired' must be an object of lists of names")
    parts = {
        name: rewriter.schema({"required": names}, f"{path}.dependentRequired.{name}")
        for name, names in needed.items()
    }
    return _dependent(source, parts)


def dependent_schemas(rewriter: Rewriter, source: dict[str, Any], path: str) -> Schema:
    parts = rewriter.map_of(source, "dependentSchemas", path)
    return _dependent(source, {name: rewriter.schema(*part) for name, part in parts.items()})


def dependencies(rewriter: Rewriter, source: dict[str, Any], path: str) -> Schema:
    """The form of older drafts for both."""
    parts = {
        name: rewriter.schema({"required": part} if isinstance(part, list) else part, place)
        for name, (part, place) in rewriter.map_of(source, "dependencies", path).items()
    }
    return _dependent(source, parts)


def _dependent(source: dict[str, Any], parts: dict[str, Schema]) -> Schema:
    others = _others(source, "object")
    return all_of(
        [
            any_of([without(name), all_of([having(name, True), part]), others])
            for name, part in parts.items()
            if part is not True
        ]
    )


def contains(rewriter: Rewriter, source: dict[str, Any], path: str) -> Schema:
    """A case for each choice of the places where the first matching items are."""
    least, most = contains_range(rewriter, source, path)
    if least == 0 and most is None:
        return True
    if most is not None and most < least:
        return _others(source, "array")
    if least > MAX_PLACES:
        rewriter.fail(path, f"keyword 'minContains' is only supported up to {MAX_PLACES}")
    match = rewriter.define(rewriter.schema(source["contains"], f"{path}.contains"), path)
    rest: Schema = True
    if most is not None:
        rest = rewriter.define(rewriter.negated(source["contains"], f"{path}.contains"), path)
    counts = range(least, least + 1 if most is None else min(most, MAX_PLACES) + 1)
    width = MAX_PLACES
    while width > least and sum(comb(width, count) for count in counts) > MAX_CASES:
        width -= 1
    rewriter.spend(10 * MAX_CASES * width, path)
    cases: list[Schema] = []
    for count in counts:
        for places in combinations(range(width), count):
            first = [match if i in places else rest for i in range(max(places, default=-1) + 1)]
            case = {"type": "array", "minItems": len(first), "items": rest}
            cases.append(case | ({"prefixItems": first} if first else {}))
    return any_of([*cases, _others(source, "array")])


def property_names(rewriter: Rewriter, source: dict[str, Any], path: str) -> Schema:
    """Rules that close the object for all other names."""
    path = f"{path}.propertyNames"
    rules = _name_rules(rewriter, source["propertyNames"], path, MAX_REFERENCES)
    if sum("patternProperties" in rule for rule in rules) > 1:
        rewriter.fail(
            path, "keyword 'propertyNames' is only supported with one pattern or range of lengths"
        )
    return all_of(list[Schema](rules))


def _name_rules(
    rewriter: Rewriter, schema: object, path: str, num_references: int
) -> list[dict[str, Any]]:
    """Schemas of objects. All names of an object that matches them match the schema of names."""
    if isinstance(schema, bool):
        return [] if schema else [NO_NAMES]
    rewriter.schema(schema, path)  # checks it
    assert isinstance(schema, dict)
    if num_references == 0:
        rewriter.fail(path, "keyword '$ref' is not supported in such a long chain")
    rules: list[dict[str, Any]] = []
    for keyword, value in schema.items():
        if keyword == "$ref":
            rules += _name_rules(rewriter, *rewriter.target(value, path), num_references - 1)
        elif keyword == "allOf":
            for part in rewriter.parts_of(schema, keyword, path):
                rules += _name_rules(rewriter, *part, num_references - 1)
        elif keyword == "type":
            rules += [] if "string" in types_of({"type": value}) else [NO_NAMES]
        elif keyword in ("const", "enum"):
            names = _writable_strings([value] if keyword == "const" else value)
            rules.append({**NO_NAMES, "properties": dict.fromkeys(names, True)})
        elif keyword == "pattern":
            rules.append(_named_like(rewriter.pattern_text(value, path)))
        elif keyword == "format" and value in STRING_FORMATS:
            rules.append(_named_like(f"^(?:{STRING_FORMATS[value]})$"))
        elif keyword == "minLength" or (keyword == "maxLength" and "minLength" not in schema):
            rules.append(_named_at_length(rewriter, schema, path))
        elif keyword == "not" and isinstance(value, dict) and len(value) == 1 and "enum" in value:
            others = excluding(rewriter, _writable_strings(value["enum"]), path)
            assert isinstance(others, dict)
            rules += [_named_like(others["pattern"])] if "pattern" in others else []
        elif keyword not in ("maxLength", "uniqueItems") and not is_annotation(keyword):
            rewriter.fail(path, f"keyword '{keyword}' is not supported there; write a pattern")
    return rules


def _writable_strings(listed: list[Any]) -> list[str]:
    return [name for name in listed if isinstance(name, str) and values.is_writable(name)]


def _named_like(expression: str) -> dict[str, Any]:
    return {"patternProperties": {expression: True}, "additionalProperties": False}


def _named_at_length(rewriter: Rewriter, schema: dict[str, Any], path: str) -> dict[str, Any]:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if max(least, most or 0) > MAX_REPEAT:
        rewriter.fail(path, f"keyword 'maxLength' is only supported up to {MAX_REPEAT} there")
    return _named_like(any_text(int(least), None if most is None else int(most)))


def unique_items(rewriter: Rewriter, source: dict[str, Any], path: str) -> Schema:
    """A list of all arrays without repetition, if there are few. Otherwise the keyword is noted as
    one that nothing enforces.
    """
    if source["uniqueItems"] not in (True, False):
        rewriter.fail(path, "'uniqueItems' must be true or false")
    least = values.count(source.get("minItems", 0), path, "minItems", rewriter.fail)
    most = values.count(source.get("maxItems", values.MAX_COUNT), path, "maxItems", rewriter.fail)
    if not source["uniqueItems"] or most <= 1:
        return True
    items = None
    if not source.get("prefixItems") and not isinstance(source.get("items"), list):
        items = _few_values(rewriter, source.get("items", True), f"{path}.items", MAX_REFERENCES)
    if items is None:
        rewriter.leave_unchecked(path, "uniqueItems")
        return True
    sizes = range(least, min(most, len(items)) + 1)
    num_arrays = sum(perm(len(items), size) for size in sizes)
    if num_arrays > MAX_ARRAYS:
        rewriter.leave_unchecked(path, "uniqueItems")
        return True
    rewriter.spend(num_arrays * (10 + len(json.dumps(items))), path)
    arrays = [list(array) for size in sizes for array in permutations(items, size)]
    return any_of([{"enum": arrays} if arrays else False, _others(source, "array")])


def _few_values(
    rewriter: Rewriter, schema: object, path: str, num_references: int
) -> list[Any] | None:
    """Different values, among which are all that match a schema. None if they may be many."""
    if not isinstance(schema, dict) or num_references == 0:
        return [] if schema is False else None
    rewriter.schema(schema, path)  # checks it
    kind, least, most = json.dumps(schema.get("type")), schema.get("minimum"), schema.get("maximum")
    found: list[Any] | None = None
    if "enum" in schema or "const" in schema:
        found = schema["enum"] if "enum" in schema else [schema["const"]]
    elif "$ref" in schema:
        found = _few_values(rewriter, *rewriter.target(schema["$ref"], path), num_references - 1)
    elif kind in _TYPES_OF_FEW:
        found = _TYPES_OF_FEW[kind]
    elif kind == '"integer"' and least is not None and most is not None:
        found = list(range(ceil(least), floor(most) + 1)) if most - least < MAX_PLACES else None
    elif "allOf" in schema:
        parts = rewriter.parts_of(schema, "allOf", path)
        few = (_few_values(rewriter, *part, num_references - 1) for part in parts)
        found = next((each for each in few if each is not None), None)
    if found is None or len(found) > MAX_ARRAYS:
        return None
    return list(
        {same_value_key(value): value for value in found if values.is_writable(value)}.values()
    )


CONDITIONS: dict[str, Callable[[Rewriter, dict[str, Any], str], Schema]] = {
    "not": negation,
    "if": if_then_else,
    "dependencies": dependencies,
    "dependentRequired": dependent_required,
    "dependentSchemas": dependent_schemas,
    "contains": contains,
    "propertyNames": property_names,
    "uniqueItems": unique_items,
}
# Keywords that modify one of `CONDITIONS`, and have no effect without it.
MODIFIERS = frozenset({"then", "else", "minContains", "maxContains"})
