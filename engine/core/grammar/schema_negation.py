"""Negates schemas, for `not` and for the conditions that need the opposite of a schema.

A schema is a conjunction of keywords, so its negation is a union: one alternative for each way to
break a keyword. The alternatives are schemas for llguidance, and every value that matches one of
them fails the original schema. A keyword that can't be negated this way is refused by name, except
where only few values are lost: no alternative has numbers with a fraction because they are not
integers, or objects because they have a property more than a constant.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from engine.core.grammar import schema_values as values
from engine.core.grammar.regex_dialect import UNWRITABLE, literal
from engine.core.grammar.schema_drafts import SchemaVersion
from engine.core.grammar.schema_logic import ALL_TYPES, Schema, types_of

# An item that breaks the rule for all items is one of the first so many.
MAX_PLACES = 16
# Max length of the regular expression of all strings but a few.
MAX_EXCLUSION_CHARS = 20_000


Part = tuple[object, str]  # a schema of the document, and its path


class Rewriter(Protocol):
    """What the rewriting of a document offers to the functions for single keywords. A `path` is the
    place of a schema in the document, for error messages.
    """

    draft: SchemaVersion

    def schema(self, schema: object, path: str) -> Schema:
        """The schema for llguidance."""

    def negated(self, schema: object, path: str) -> Schema:
        """The opposite of a schema, for llguidance."""

    def define(self, schema: Schema, path: str) -> Schema:
        """A reference to a rewritten schema, which can be used many times and is written once."""

    def negated_target(self, reference: object, path: str) -> Schema:
        """The opposite of the schema in the document that a `$ref` points to."""

    def target(self, reference: object, path: str) -> tuple[object, str]:
        """The schema in the document that a `$ref` points to, and its path."""

    def parts_of(self, source: dict[str, Any], keyword: str, path: str) -> list[Part]:
        """The schemas in a keyword's list, with their paths."""

    def map_of(self, source: dict[str, Any], keyword: str, path: str) -> dict[str, Part]:
        """The schemas in a keyword's object, with their paths."""

    def pattern_text(self, pattern: object, path: str) -> str:
        """A pattern in llguidance's syntax."""

    def spend(self, amount: int, path: str) -> None:
        """Count work of this amount, before it is done. Refuses schemas that need too much."""

    def leave_unchecked(self, path: str, keyword: str) -> None:
        """Note that nothing enforces a keyword."""

    def fail(self, path: str, problem: str) -> NoReturn: ...


def any_of(alternatives: list[Schema]) -> Schema:
    if any(each is True for each in alternatives):
        return True
    possible = [each for each in alternatives if each is not False]
    if len(possible) < 2:
        return possible[0] if possible else False
    return {"anyOf": possible}


def all_of(demands: list[Schema]) -> Schema:
    if any(each is False for each in demands):
        return False
    strict = [each for each in demands if each is not True]
    if len(strict) < 2:
        return strict[0] if strict else True
    return {"allOf": strict}


def without(name: str) -> dict[str, Any]:
    """Objects that lack a property."""
    return {"type": "object", "properties": {name: False}}


def having(name: str, schema: Schema) -> Schema:
    """Objects with a property that matches a schema."""
    if schema is False:
        return False
    return {"type": "object", "required": [name], "properties": {name: schema}}


def item_at(place: int, schema: Schema) -> Schema:
    """Arrays with an item at this place that matches a schema."""
    if schema is False:
        return False
    return {"type": "array", "minItems": place + 1, "prefixItems": [True] * place + [schema]}


def alternatives(rewriter: Rewriter, source: dict[str, Any], path: str) -> list[Schema]:
    """The ways in which a value can fail a schema that is an object."""
    if "$ref" in source and rewriter.draft < SchemaVersion.D2019:
        source = {"$ref": source["$ref"]}  # these drafts ignore what is next to a reference
    found: list[Schema] = []
    for keyword, value in source.items():
        if rewriter.draft < _FIRST_DRAFTS.get(keyword, SchemaVersion.D4):
            rewriter.fail(path, f"keyword '{keyword}' is not in the draft that \"$schema\" names")
        if keyword in _NEGATIONS:
            found += _NEGATIONS[keyword](rewriter, source, keyword, path)
        elif json.dumps(value) not in _WITHOUT_EFFECT.get(keyword, ()):
            rewriter.fail(
                path,
                f"keyword '{keyword}' is not supported where a condition needs the opposite of its "
                "schema, as 'not' and 'if' do; describe what is allowed with anyOf",
            )
    return found


def _nothing(rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str) -> list[Schema]:
    """Of a keyword that another one negates."""
    return []


def _not_reference(
    rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str
) -> list[Schema]:
    return [rewriter.negated_target(source[keyword], path)]


def _not_type(rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str) -> list[Schema]:
    rewriter.schema({"type": source["type"]}, path)  # checks it
    others = ALL_TYPES - types_of({"type": source["type"]})
    if "integer" not in others:
        others -= {"number"}
    return [{"type": sorted(others - {"integer"})}] if others else []


def _not_values(
    rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str
) -> list[Schema]:
    given = source[keyword]
    if not given and keyword == "enum":
        return [True]
    rewriter.schema({keyword: given}, path)  # checks it
    return _other_values(rewriter, given if keyword == "enum" else [given], f"{path}.{keyword}")


def _other_values(rewriter: Rewriter, excluded: list[Any], path: str) -> list[Schema]:
    """All values but a few."""
    numbers = [v for v in excluded if isinstance(v, int | float) and not isinstance(v, bool)]
    strings = [value for value in excluded if isinstance(value, str)]
    bools = [flag for flag in (False, True) if not any(value is flag for value in excluded)]
    lists = [value for value in excluded if isinstance(value, list)]
    objects = [value for value in excluded if isinstance(value, dict)]
    found: list[Schema] = [{"type": "null"}] if None not in excluded else []
    if bools:
        found.append({"enum": bools})
    found.append(excluding(rewriter, strings, path))
    found += _other_numbers(rewriter, sorted({*numbers}), path)
    found.append(all_of([{"type": "array"}, *(_other_list(rewriter, v, path) for v in lists)]))
    found.append(all_of([{"type": "object"}, *(_other_object(rewriter, v, path) for v in objects)]))
    return found


def excluding(rewriter: Rewriter, strings: list[str], path: str) -> Schema:
    """All strings but a few.

    The regular expression has an alternative for each beginning of an excluded string: a string
    that goes on differently behind it.
    """
    excluded = {text for text in strings if values.is_writable(text)}
    if not excluded:
        return {"type": "string"}
    if sum(len(text) * (len(text) + 8) for text in excluded) > 16 * MAX_EXCLUSION_CHARS:
        rewriter.fail(path, "its strings are too long to be excluded; describe what is allowed")
    continued: dict[str, set[str]] = {"": set()}
    for text in sorted(excluded):
        for end, char in enumerate(text):
            continued.setdefault(text[:end], set()).add(char)
        continued.setdefault(text, set())
    branches = []
    for start, following in continued.items():
        members = "".join(map(literal, sorted(following)))
        different = f"[^{members}{UNWRITABLE}][^{UNWRITABLE}]*"
        ending = different if start in excluded else f"(?:{different})?"
        branches.append("".join(map(literal, start)) + ending)
    expression = f"^(?:{'|'.join(branches)})$"
    rewriter.spend(len(expression), path)
    if len(expression) > MAX_EXCLUSION_CHARS:
        rewriter.fail(path, "its strings are too long to be excluded; describe what is allowed")
    return {"type": "string", "pattern": expression}


def _other_numbers(rewriter: Rewriter, numbers: list[float], path: str) -> list[Schema]:
    """The ranges between the excluded numbers."""
    if not numbers:
        return [{"type": "number"}]
    limits: list[float | None] = [None, *numbers, None]
    found: list[Schema] = []
    for low, high in zip(limits, limits[1:], strict=False):
        bounds = _beyond(rewriter, "minimum", low) | _beyond(rewriter, "maximum", high)
        found.append(rewriter.schema({"type": "number", **bounds}, path))
    return found


def _beyond(rewriter: Rewriter, keyword: str, number: float | None) -> dict[str, Any]:
    """An exclusive bound, in the form that the document's draft has for it."""
    if number is None:
        return {}
    exclusive = f"exclusive{keyword.capitalize()}"
    if rewriter.draft is SchemaVersion.D4:
        return {keyword: number, exclusive: True}
    return {exclusive: number}


def _other_list(rewriter: Rewriter, value: list[Any], path: str) -> Schema:
    size = len(value)
    found: list[Schema] = [{"type": "array", "minItems": size + 1}]
    if value:
        found.append({"type": "array", "maxItems": size - 1})
    rewriter.spend(size * size, path)
    for place, item in enumerate(value):
        found.append(item_at(place, any_of(_other_values(rewriter, [item], path))))
    return any_of(found)


def _other_object(rewriter: Rewriter, value: dict[str, Any], path: str) -> Schema:
    if not value:
        return {"type": "object", "minProperties": 1}
    found: list[Schema] = []
    for name, part in value.items():
        found.append(without(name))
        found.append(having(name, any_of(_other_values(rewriter, [part], path))))
    return any_of(found)


def _not_bound(rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str) -> list[Schema]:
    """The numbers beyond one of the four bounds."""
    rewriter.schema({keyword: source[keyword]}, path)  # checks it
    is_old = rewriter.draft is SchemaVersion.D4
    is_exclusive = keyword.startswith("exclusive")
    if is_old and is_exclusive:
        return []  # it belongs to the other keyword
    inclusive = keyword.removeprefix("exclusive").lower()
    opposite = "maximum" if inclusive == "minimum" else "minimum"
    if is_old:
        is_exclusive = source.get(f"exclusive{keyword.capitalize()}") is True
    number = source[keyword]
    bound = {opposite: number} if is_exclusive else _beyond(rewriter, opposite, number)
    return [rewriter.schema({"type": "number", **bound}, path)]


def _not_size(rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str) -> list[Schema]:
    """Of the keywords that count characters, items or properties."""
    kind = _SIZED[keyword[3:]]
    limit = values.count(source[keyword], path, keyword, rewriter.fail)
    if keyword.startswith("max"):
        return [rewriter.schema({"type": kind, f"min{keyword[3:]}": limit + 1}, path)]
    if limit == 0:
        return []
    return [rewriter.schema({"type": kind, f"max{keyword[3:]}": limit - 1}, path)]


def _not_required(
    rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str
) -> list[Schema]:
    rewriter.schema({"required": source["required"]}, path)  # checks it
    return [without(name) for name in source["required"]]


def _not_properties(
    rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str
) -> list[Schema]:
    parts = rewriter.map_of(source, keyword, path)
    return [having(name, rewriter.negated(*part)) for name, part in parts.items()]


def _not_first_items(
    rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str
) -> list[Schema]:
    parts = rewriter.parts_of(source, keyword, path)
    rewriter.spend(len(parts) ** 2, path)
    return [item_at(place, rewriter.negated(*part)) for place, part in enumerate(parts)]


def _not_items(rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str) -> list[Schema]:
    if isinstance(source[keyword], list):
        return _not_first_items(rewriter, source, keyword, path) if source[keyword] else []
    first = source.get("prefixItems", []) if keyword == "items" else source.get("items")
    if not isinstance(first, list):
        return []  # `additionalItems` has no effect
    wrong = rewriter.define(rewriter.negated(source[keyword], f"{path}.{keyword}"), path)
    if wrong is False:
        return []
    places = range(len(first), len(first) + MAX_PLACES)
    rewriter.spend(sum(places), path)
    return [item_at(place, wrong) for place in places]


def _not_all(rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str) -> list[Schema]:
    return [rewriter.negated(*part) for part in rewriter.parts_of(source, keyword, path)]


def _not_any(rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str) -> list[Schema]:
    return [all_of([rewriter.negated(*part) for part in rewriter.parts_of(source, keyword, path)])]


def _not_one(rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str) -> list[Schema]:
    """No branch matches, or two of them do."""
    parts = rewriter.parts_of(source, keyword, path)
    rewriter.spend(len(parts) ** 2, path)
    found = [all_of([rewriter.negated(*part) for part in parts])]
    matched = [rewriter.define(rewriter.schema(*part), path) for part in parts]
    for index, one in enumerate(matched):
        found += [all_of([one, other]) for other in matched[index + 1 :]]
    return found


def _not_not(rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str) -> list[Schema]:
    return [rewriter.schema(source["not"], f"{path}.not")]


def _not_if(rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str) -> list[Schema]:
    found: list[Schema] = []
    if "then" in source:
        matched = rewriter.schema(source["if"], f"{path}.if")
        found.append(all_of([matched, rewriter.negated(source["then"], f"{path}.then")]))
    if "else" in source:
        failed = rewriter.negated(source["if"], f"{path}.if")
        found.append(all_of([failed, rewriter.negated(source["else"], f"{path}.else")]))
    return found


def _not_contains(
    rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str
) -> list[Schema]:
    """Arrays with too few items that match, or with too many."""
    least, most = contains_range(rewriter, source, path)
    found: list[Schema] = []
    if least == 1:
        wrong = rewriter.negated(source["contains"], f"{path}.contains")
        found.append({"type": "array", "items": wrong})
    elif least > 1:
        fewer = {"contains": source["contains"], "minContains": 0, "maxContains": least - 1}
        found.append(rewriter.schema({"type": "array", **fewer}, path))
    if most is not None:
        more = {"contains": source["contains"], "minContains": most + 1}
        found.append(rewriter.schema({"type": "array", **more}, path))
    return found


def contains_range(rewriter: Rewriter, source: dict[str, Any], path: str) -> tuple[int, int | None]:
    """How many items must match `contains`, and how many may."""
    if rewriter.draft < SchemaVersion.D2019:
        return 1, None
    least = values.count(source.get("minContains", 1), path, "minContains", rewriter.fail)
    if "maxContains" not in source:
        return least, None
    return least, values.count(source["maxContains"], path, "maxContains", rewriter.fail)


def _not_dependent_required(
    rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str
) -> list[Schema]:
    found: list[Schema] = []
    for name, needed in source[keyword].items():
        rewriter.schema({"required": needed}, f"{path}.{keyword}.{name}")  # checks it
        found += [all_of([having(name, True), without(each)]) for each in needed]
    return found


def _not_dependent_schemas(
    rewriter: Rewriter, source: dict[str, Any], keyword: str, path: str
) -> list[Schema]:
    return [
        all_of([having(name, True), rewriter.negated(*part)])
        for name, part in rewriter.map_of(source, keyword, path).items()
    ]


_SIZED = {"Length": "string", "Items": "array", "Properties": "object"}
_NEGATIONS: dict[str, Callable[[Rewriter, dict[str, Any], str, str], list[Schema]]] = {
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), _not_reference),
    "type": _not_type,
    "const": _not_values,
    "enum": _not_values,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _not_bound),
    **{f"{bound}{name}": _not_size for name in _SIZED for bound in ("min", "max")},
    "required": _not_required,
    "properties": _not_properties,
    "prefixItems": _not_first_items,
    "items": _not_items,
    "additionalItems": _not_items,
    "allOf": _not_all,
    "anyOf": _not_any,
    "oneOf": _not_one,
    "not": _not_not,
    "if": _not_if,
    "then": _nothing,
    "else": _nothing,
    "contains": _not_contains,
    "minContains": _nothing,
    "maxContains": _nothing,
    "dependentRequired": _not_dependent_required,
    "dependentSchemas": _not_dependent_schemas,
}
# Keyword that can't be negated -> its values, as JSON, that don't constrain anything.
_WITHOUT_EFFECT = {
    "additionalProperties": ("true", "{}"),
    "patternProperties": ("{}",),
    "propertyNames": ("true", "{}"),
    "unevaluatedItems": ("true", "{}"),
    "unevaluatedProperties": ("true", "{}"),
    "uniqueItems": ("false",),
    "dependencies": ("{}",),
}
# Keyword -> the first draft that has it. A validator of an older draft ignores the keyword, so that
# no value fails it.
_FIRST_DRAFTS = {
    "const": SchemaVersion.D6,
    "contains": SchemaVersion.D6,
    "if": SchemaVersion.D7,
    "dependentRequired": SchemaVersion.D2019,
    "dependentSchemas": SchemaVersion.D2019,
    "prefixItems": SchemaVersion.D2020,
    "$recursiveRef": SchemaVersion.D2019,
    "$dynamicRef": SchemaVersion.D2020,
}
