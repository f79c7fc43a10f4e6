"""Joins conditions that compare the same property with constants, as schemas of forms have them.

Each `if` alone has two cases, so n of them have 2**n combinations. Together they have one case for
each constant, one for all other values of the property, and one for values without it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.core.grammar import schema_values as values
from engine.core.grammar.schema_logic import ALL_TYPES, Schema
from engine.core.grammar.schema_negation import (
    Part,
    Rewriter,
    all_of,
    any_of,
    excluding,
    having,
    without,
)
from engine.core.grammar.schema_values import is_annotation


class _Comparison(NamedTuple):
    """An `if` that compares a property with strings."""

    name: str
    constants: list[str]
    matches_absence: bool  # whether objects without the property match
    matches_others: bool  # whether values that are no objects match


def joined(rewriter: Rewriter, parts: list[Part]) -> tuple[list[Part], list[Schema]]:
    """The parts of an `allOf` that stay as they are, and a schema for each property with which
    several other parts begin.
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
    return rest, [_cases(rewriter, name, group) for name, group in groups.items()]


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


def _cases(rewriter: Rewriter, name: str, group: list[tuple[_Comparison, Part]]) -> Schema:
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
