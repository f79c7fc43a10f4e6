"""Rewrites `unevaluatedProperties` and `unevaluatedItems`, which apply to what no other keyword of
the same value applies to.

Which properties and items these are depends on the branches that match, for example of `anyOf`.
There is a case for each choice of branches. It demands that they match and closes the value for all
that they do not name. So every value that matches a case is valid. A value that needs properties of
several branches of `anyOf` matches only if there are few branches.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from engine.core.grammar.schema_conditions import MAX_CASES, MAX_REFERENCES
from engine.core.grammar.schema_drafts import SchemaVersion
from engine.core.grammar.schema_logic import Schema
from engine.core.grammar.schema_negation import Part, Rewriter, all_of, any_of, having

MAX_COMBINED = 4  # branches of one `anyOf` of which each combination is a case


@dataclass(frozen=True)
class _Case:
    """A choice of branches. `demands` are schemas that a value must match so that the rest is
    evaluated.
    """

    demands: tuple[Schema, ...] = ()
    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    has_all_names: bool = False
    num_items: int = 0
    has_all_items: bool = False
    contained: tuple[Schema, ...] = ()  # items that match one of these are evaluated

    def joined(self, other: "_Case") -> "_Case":
        return _Case(
            demands=(*self.demands, *other.demands),
            names=self.names | other.names,
            patterns=self.patterns | other.patterns,
            has_all_names=self.has_all_names or other.has_all_names,
            num_items=max(self.num_items, other.num_items),
            has_all_items=self.has_all_items or other.has_all_items,
            contained=(*self.contained, *other.contained),
        )

    def demanding(self, schema: Schema) -> "_Case":
        return self.joined(_Case(demands=(schema,)))


def unevaluated_properties(rewriter: Rewriter, source: dict[str, Any], path: str) -> Schema:
    rest = _rest(rewriter, source, "unevaluatedProperties", path)
    if rest is True:
        return True

    def closed(case: _Case) -> Schema:
        if case.has_all_names:
            return True
        return {
            "properties": dict.fromkeys(sorted(case.names), True),
            "patternProperties": dict.fromkeys(sorted(case.patterns), True),
            "additionalProperties": rest,
        }

    cases = _cases_beside(rewriter, source, "unevaluatedProperties", path)
    return any_of([all_of([*case.demands, closed(case)]) for case in cases])


def unevaluated_items(rewriter: Rewriter, source: dict[str, Any], path: str) -> Schema:
    rest = _rest(rewriter, source, "unevaluatedItems", path)
    if rest is True:
        return True

    def closed(case: _Case) -> Schema:
        if case.has_all_items:
            return True
        rule: dict[str, Any] = {"items": any_of([rest, *case.contained])}
        if case.num_items:
            rule["prefixItems"] = [True] * case.num_items
        return rule

    cases = _cases_beside(rewriter, source, "unevaluatedItems", path)
    return any_of([all_of([*case.demands, closed(case)]) for case in cases])


def _rest(rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str) -> Schema:
    schema = rewriter.schema(source[keyword], f"{path}.{keyword}")
    return True if schema == {} else rewriter.define(schema, path)


def _cases_beside(
    rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str
) -> list[_Case]:
    others = {name: value for name, value in source.items() if name != keyword}
    return _cases(rewriter, others, path, MAX_REFERENCES)


def _cases(rewriter: Rewriter, schema: object, path: str, num_references: int) -> list[_Case]:
    """The cases of a schema that applies to the value. Its keywords are checked, because the schema
    is rewritten too.
    """
    if not isinstance(schema, dict):
        return [_Case()]
    if num_references == 0:
        rewriter.fail(path, "keyword '$ref' is not supported in such a long chain")

    def inner(part: Part) -> list[_Case]:
        return _cases(rewriter, *part, num_references - 1)

    cases = [_own_case(rewriter, schema, path)]
    for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
        if keyword in schema:
            cases = _crossed(rewriter, cases, inner(rewriter.target(schema[keyword], path)), path)
    for part in rewriter.parts_of(schema, "allOf", path) if "allOf" in schema else ():
        cases = _crossed(rewriter, cases, inner(part), path)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            parts = rewriter.parts_of(schema, keyword, path)
            groups = [
                [case.demanding(rewriter.schema(*part)) for case in inner(part)] for part in parts
            ]
            chosen = [case for group in groups for case in group]
            if keyword == "anyOf" and len(groups) <= MAX_COMBINED:
                chosen = _combined(rewriter, groups, path)
            cases = _crossed(rewriter, cases, chosen, path)
    if "if" in schema:
        cases = _crossed(
            rewriter, cases, _conditional(rewriter, schema, path, num_references), path
        )
    if "dependentSchemas" in schema:
        for name, part in rewriter.map_of(schema, "dependentSchemas", path).items():
            present = [case.demanding(having(name, True)) for case in inner(part)]
            cases = _crossed(rewriter, cases, [_Case(), *present], path)
    return cases


def _combined(rewriter: Rewriter, groups: list[list[_Case]], path: str) -> list[_Case]:
    """The cases in which one or several branches match."""
    chosen: list[_Case] = []
    for size in range(1, len(groups) + 1):
        for some in combinations(groups, size):
            cases = [_Case()]
            for group in some:
                cases = _crossed(rewriter, cases, group, path)
            chosen += cases
    return chosen


def _conditional(
    rewriter: Rewriter, schema: dict[str, Any], path: str, num_references: int
) -> list[_Case]:
    """The cases of `if`, which counts even without `then`."""

    def inner(keyword: str) -> list[_Case]:
        part = schema.get(keyword, True)
        return _cases(rewriter, part, f"{path}.{keyword}", num_references - 1)

    matched = rewriter.schema(schema["if"], f"{path}.if")
    cases = [
        case.demanding(matched) for case in _crossed(rewriter, inner("if"), inner("then"), path)
    ]
    if "else" not in schema:
        return [*cases, _Case()]
    failed = rewriter.negated(schema["if"], f"{path}.if")
    return [*cases, *(case.demanding(failed) for case in inner("else"))]


def _crossed(rewriter: Rewriter, cases: list[_Case], others: list[_Case], path: str) -> list[_Case]:
    if len(cases) * len(others) > MAX_CASES:
        rewriter.fail(
            path,
            "keyword 'unevaluatedProperties' or 'unevaluatedItems' is not supported with so many "
            "branches; set additionalProperties or items in each of them",
        )
    joined = [case.joined(other) for case in cases for other in others]
    rewriter.spend(sum(10 + len(case.names) + len(case.patterns) for case in joined), path)
    return joined


def _own_case(rewriter: Rewriter, schema: dict[str, Any], path: str) -> _Case:
    """What the keywords of a schema itself evaluate."""
    names = frozenset(schema.get("properties", ()))
    patterns = frozenset(
        rewriter.pattern_text(pattern, path) for pattern in schema.get("patternProperties", ())
    )
    items, first = schema.get("items"), schema.get("prefixItems", [])
    if isinstance(items, list):
        items, first = schema.get("additionalItems"), items
    contained: tuple[Schema, ...] = ()
    if "contains" in schema and rewriter.draft is SchemaVersion.D2020:
        match = rewriter.schema(schema["contains"], f"{path}.contains")
        contained = (rewriter.define(match, path),)
    return _Case(
        names=names,
        patterns=patterns,
        has_all_names=bool({"additionalProperties", "unevaluatedProperties"} & schema.keys()),
        num_items=len(first),
        has_all_items=items is not None or "unevaluatedItems" in schema,
        contained=contained,
    )
