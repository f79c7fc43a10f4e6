"""Rewrites JSON schemas for llguidance. Every keyword of a schema is either enforced or known to
have no effect. A schema with any other keyword is refused, and the error names the keyword.

A schema of any draft from 4 on is rewritten to the subset of draft 2020-12 that llguidance enforces
exactly. Targets of references become definitions. Formats and patterns become regular expressions
in llguidance's syntax. Bounds are chosen so that rounding can't cross them. `oneOf` becomes `anyOf`
if its branches are proved disjoint. Every value that matches the result also matches the original
schema. The reverse is not always true: properties must come in one order, and bounded numbers have
no exponents.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn

from engine.core.errors import InvalidRequestError
from engine.core.grammar import schema_values as values
from engine.core.grammar.regex_dialect import RegexError, admits_many_texts, translate
from engine.core.grammar.schema_conditions import CONDITIONS, MODIFIERS, joined
from engine.core.grammar.schema_drafts import Resolver, SchemaVersion, draft_of
from engine.core.grammar.schema_evaluation import unevaluated_items, unevaluated_properties
from engine.core.grammar.schema_logic import (
    ALL_TYPES,
    REF_PREFIX,
    Disjoint,
    Node,
    Satisfiable,
    Schema,
    has_loop,
    most_cases,
    references,
    types_of,
)
from engine.core.grammar.schema_negation import Part, all_of, alternatives, any_of
from engine.core.grammar.schema_values import (
    FREE_FORMATS,
    INTEGER_FORMATS,
    JSON_STYLE,
    REFUSED,
    STRING_FORMATS,
    WITHOUT_EFFECT,
    is_annotation,
)

MAX_NESTING = 100
MAX_DEFINITIONS = 1_000
# Max number of combinations of branches of one value, in schemas with conditions.
MAX_COMBINATIONS = 512
# Max work of rewriting a document, which takes a quarter of a second. The largest document without
# conditions is just within it. Conditions rewrite parts of a document several times.
MAX_WORK = 250_000

# This error is for patterns of names that match only a few names. When all these names are used,
# the grammar would still demand another name, and the output could not go on.
SHORT_NAMES = (
    "keyword '{}' is not supported with a pattern that limits the length of names, where other "
    "properties are declared; list the names in 'properties'"
)


def compile_schema(schema: object, param: str) -> dict[str, Any]:
    """Rewrite a schema for llguidance. The result can also be used after `%json` in a Lark grammar.

    Error messages start with `param`, the request parameter that contains the schema, and a path in
    the schema.
    """
    return _Rewriting(schema, param).run()


def unchecked_keywords(schema: object, param: str) -> list[str]:
    """The places of keywords in a schema that its grammar does not enforce, with their names."""
    rewriting = _Rewriting(schema, param)
    rewriting.run()
    return sorted(rewriting.unchecked)


class _Rewriting:
    """Rewrites one schema document for llguidance."""

    def __init__(self, document: object, param: str) -> None:
        self._param = param
        self._document = document
        self.draft = draft_of(document, param, self.fail)
        self._resolver = Resolver(document, self.draft, self.fail)
        self._definitions: dict[str, Schema] = {}
        # Definitions that are not yet rewritten: their keys, functions that rewrite them, and what
        # these take.
        self._pending: list[tuple[str, Callable[[object, str], Schema], Part]] = []
        self._disjoint = Disjoint(self._definitions)
        # Path in the document -> definition key. The paths of negated schemas begin with None.
        # Definitions that are not in the document have a number instead.
        self._keys: dict[tuple[object, ...], str] = {}
        self._intersects = False  # whether two schemas apply to the same value, as in `allOf`
        # Path of a `patternProperties` whose pattern matches only names of limited length.
        self._short_names: str | None = None
        # Nodes with `oneOf`, the branches in the document, and the nodes' paths. It is not yet
        # proved that the branches are disjoint.
        self._exclusive: list[tuple[dict[str, Any], list[Part], str]] = []
        self._work_left = MAX_WORK
        self._has_conditions = False
        self.unchecked: set[str] = set()

    def run(self) -> dict[str, Any]:
        values.check_text(self._document, self._param, MAX_NESTING, self.fail)
        root = self.schema(self._document, self._param)
        self._rewrite_pending()
        while self._exclusive:
            self._make_exclusive(*self._exclusive.pop())
            self._rewrite_pending()
        if has_loop(self._definitions):
            self.fail(self._param, "a '$ref' leads back to itself without any value in between")
        if self._short_names is not None and self._intersects:
            keyword = self._short_names.rpartition(".")[2]
            self.fail(self._short_names, SHORT_NAMES.format(keyword))
        satisfiable = Satisfiable(self._definitions)
        if not satisfiable.admits(root):
            self.fail(self._param, "no finite JSON value matches this schema")
        root = satisfiable.prune(root)
        if self._has_conditions:
            self._check_cases([root, *self._definitions.values()])
        used = self._used_definitions(root, satisfiable)
        result = {} if isinstance(root, bool) else dict(root)
        if used:
            result["$defs"] = used
        return {"x-guidance": JSON_STYLE, **result}

    def _rewrite_pending(self) -> None:
        while self._pending:
            key, rewrite, part = self._pending.pop()
            self._definitions[key] = rewrite(*part)

    def _check_cases(self, schemas: list[Schema]) -> None:
        if most_cases(schemas) > MAX_COMBINATIONS:
            self.fail(
                self._param,
                f"the conditions on one value have over {MAX_COMBINATIONS} combinations; write "
                "fewer, or use anyOf with one branch for each case",
            )

    def _used_definitions(self, root: Schema, satisfiable: Satisfiable) -> dict[str, Schema]:
        used: dict[str, Schema] = {}
        pending = references(root)
        while pending:
            key = pending.pop()
            used[key] = satisfiable.prune(self._definitions[key])
            pending |= references(used[key]) - used.keys()
        return used

    def fail(self, path: str, problem: str) -> NoReturn:
        raise InvalidRequestError(f"{path}: {problem}.", param=self._param)

    def spend(self, amount: int, path: str) -> None:
        self._work_left -= amount
        if self._work_left < 0:
            self.fail(path, "the schema is too large once its conditions are written out")

    def leave_unchecked(self, path: str, keyword: str) -> None:
        self.unchecked.add(f"{path}.{keyword}")

    def schema(self, schema: object, path: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        asserted = self._asserted(schema, path)
        node = Node(asserted, path)
        if "type" in asserted:  # handled first, because other keywords depend on it
            self._type(node, "type")
        for keyword in [name for name in asserted if name in HANDLERS]:
            HANDLERS[keyword](self, node, keyword)
        for keyword in [name for name in asserted if name in RULES]:
            self._demand(node, RULES[keyword](self, asserted, path))
        # Move these keywords to the end, so that llguidance reads properties and similar keywords
        # first and together.
        applied = APPLIED_LAST & node.output.keys()
        for keyword in applied:
            node.output[keyword] = node.output.pop(keyword)
        if "allOf" in applied or (applied and node.output.keys() - applied - {"type"}):
            self._intersects = True
        for keyword in ("minimum", "maximum"):
            if shorter := values.shorter_forms(keyword, node.output.get(keyword, 0)):
                node.demand({"anyOf": [{keyword: node.output.pop(keyword)}, {"enum": shorter}]})
        if not types_of(node.output):
            self.fail(path, "no JSON value matches both its type and its values")
        return node.output

    def negated(self, schema: object, path: str) -> Schema:
        if isinstance(schema, bool):
            return not schema
        return any_of(alternatives(self, self._asserted(schema, path), path))

    def negated_target(self, reference: object, path: str) -> Schema:
        place, schema = self._resolver.resolve(reference, path)
        return self._defined((None, *place), self.negated, (schema, self._path_of(place)), path)

    def target(self, reference: object, path: str) -> Part:
        place, schema = self._resolver.resolve(reference, path)
        return schema, self._path_of(place)

    def define(self, schema: Schema, path: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        return self._defined((len(self._keys),), lambda *_: schema, (schema, path), path)

    def _defined(
        self,
        place: tuple[object, ...],
        rewrite: Callable[[object, str], Schema],
        part: Part,
        path: str,
    ) -> dict[str, Any]:
        key = self._keys.get(place)
        if key is None:
            if len(self._keys) >= MAX_DEFINITIONS:
                self.fail(path, f"there are more than {MAX_DEFINITIONS} references")
            key = self._keys[place] = str(len(self._keys))
            self._pending.append((key, rewrite, part))
        return {"$ref": REF_PREFIX + key}

    def _path_of(self, place: tuple[str, ...]) -> str:
        return ".".join([self._param, *place])

    def _asserted(self, schema: object, path: str) -> dict[str, Any]:
        """The keywords of a schema that constrain values. Refuses those that are not supported."""
        if not isinstance(schema, dict):
            self.fail(path, "a schema must be an object or a boolean")
        self.spend(10, path)
        asserted: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in HANDLERS or keyword in RULES or keyword in MODIFIERS:
                self.spend(values.work(keyword, value), path)
                asserted[keyword] = value
            elif not is_annotation(keyword):
                self._pass_or_refuse(keyword, value, path)
        self._resolver.check_identifier(schema, path)
        return asserted

    def _demand(self, node: Node, rule: Schema) -> None:
        """Add what a condition demands of the value."""
        if rule is True:
            return
        self._has_conditions = True
        if not isinstance(rule, dict) or rule.keys() != {*CLOSING}:
            node.demand(rule)
            return
        patterns = rule["patternProperties"]
        if not all(map(admits_many_texts, patterns)):
            self._short_names = f"{node.path}.propertyNames"
        if node.output.keys() & {"properties", "patternProperties", "required", "allOf"}:
            node.demand(rule)
        else:  # the same without an intersection
            rest = node.output.get("additionalProperties", True)
            node.output["patternProperties"] = dict.fromkeys(patterns, rest)
            node.output["additionalProperties"] = False

    def _pass_or_refuse(self, keyword: str, value: Any, path: str) -> None:
        if keyword not in REFUSED:
            self.fail(path, f"keyword '{keyword}' is not known; nothing would enforce it")
        if json.dumps(value) not in WITHOUT_EFFECT.get(keyword, ()):
            self.fail(path, f"keyword '{keyword}' is not supported; {REFUSED[keyword]}")

    def parts_of(self, source: dict[str, Any], keyword: str, path: str) -> list[Part]:
        parts = source[keyword]
        if not isinstance(parts, list) or not parts:
            self.fail(path, f"'{keyword}' must be a list of schemas that is not empty")
        return [(part, f"{path}.{keyword}[{index}]") for index, part in enumerate(parts)]

    def map_of(self, source: dict[str, Any], keyword: str, path: str) -> dict[str, Part]:
        parts = source[keyword]
        if not isinstance(parts, dict):
            self.fail(path, f"'{keyword}' must be an object of schemas")
        return {name: (part, f"{path}.{keyword}.{name}") for name, part in parts.items()}

    # Handlers of keywords that contain or reference schemas.

    def _reference(self, node: Node, keyword: str) -> None:
        place, schema = self._resolver.resolve(node.source[keyword], node.path)
        part = (schema, self._path_of(place))
        rule = self._defined(place, self.schema, part, node.path)
        if "$ref" in node.output:
            node.demand(rule)
        else:
            node.output |= rule

    def _list(self, node: Node, keyword: str) -> None:
        parts = self.parts_of(node.source, keyword, node.path)
        if keyword == "allOf":
            parts, cases = joined(self, parts)
            for each in cases:
                self._demand(node, each)
        compiled = [self.schema(*part) for part in parts]
        if keyword == "oneOf":
            self._exclusive.append((node.output, parts, node.path))
            node.output["oneOf"] = compiled
        elif keyword == "allOf":
            node.demand(*compiled)
        else:
            node.output[keyword] = compiled

    def _make_exclusive(self, node: dict[str, Any], parts: list[Part], path: str) -> None:
        """Turn `oneOf` into `anyOf`. Unless the branches are disjoint, each of them also demands
        the opposite of all others.
        """
        branches = node.pop("oneOf")
        if not self._disjoint.all_pairs(branches):
            self._has_conditions = True
            try:
                self.spend(len(parts) ** 2, path)
                opposites = [self.define(self.negated(*part), path) for part in parts]
            except InvalidRequestError:
                self.fail(
                    path,
                    "keyword 'oneOf' is not supported where several of its branches may match at "
                    "once; use anyOf, or give each branch a required property with its own const",
                )
            branches = [
                all_of([branch, *opposites[:index], *opposites[index + 1 :]])
                for index, branch in enumerate(branches)
            ]
        if "anyOf" in node:
            node.setdefault("allOf", []).append({"anyOf": branches})
        else:
            node["anyOf"] = branches

    def _map(self, node: Node, keyword: str) -> None:
        path = f"{node.path}.{keyword}"
        parts = self.map_of(node.source, keyword, node.path)
        compiled = {name: self.schema(*part) for name, part in parts.items()}
        if keyword == "patternProperties":
            compiled = {self.pattern_text(name, path): compiled[name] for name in compiled}
            if not all(map(admits_many_texts, compiled)):
                if node.source.get("properties") or node.source.get("required"):
                    self.fail(path, SHORT_NAMES.format(keyword))
                self._short_names = path
        node.output[keyword] = compiled

    def _part(self, node: Node, keyword: str) -> None:
        node.output[keyword] = self.schema(node.source[keyword], f"{node.path}.{keyword}")

    def _items(self, node: Node, keyword: str) -> None:
        """Rewrite `items` and `additionalItems` of older drafts to `prefixItems` and `items`."""
        items = node.source.get("items")
        if keyword == "items" and not isinstance(items, list):
            self._part(node, "items")
        elif self.draft is SchemaVersion.D2020:
            hint = "use prefixItems and items" if keyword == "items" else "use items"
            self.fail(node.path, f"'{keyword}' in this form is not in draft 2020-12; {hint}")
        elif keyword == "items" and items:
            path = f"{node.path}.items"
            node.output["prefixItems"] = [
                self.schema(part, f"{path}[{i}]") for i, part in enumerate(items)
            ]
        elif keyword == "additionalItems" and isinstance(items, list):
            path = f"{node.path}.additionalItems"
            node.output["items"] = self.schema(node.source[keyword], path)

    def _prefix_items(self, node: Node, keyword: str) -> None:
        if self.draft is not SchemaVersion.D2020:
            self.fail(node.path, "'prefixItems' needs \"$schema\" to name draft 2020-12")
        self._list(node, keyword)

    # Handlers of keywords that constrain values directly.

    def _type(self, node: Node, keyword: str) -> None:
        named = node.source["type"]
        names = [named] if isinstance(named, str) else named
        if not isinstance(names, list) or not names or not all(n in ALL_TYPES for n in names):
            self.fail(node.path, f"'type' must be of {', '.join(sorted(ALL_TYPES))}")
        node.output["type"] = named

    def _enumeration(self, node: Node, keyword: str) -> None:
        given = node.source[keyword]
        if keyword == "enum" and not isinstance(given, list):
            self.fail(node.path, "'enum' must be a list")
        path = f"{node.path}.{keyword}"
        allowed = [
            values.exact(value, path, self.fail)
            for value in (given if keyword == "enum" else [given])
        ]
        allowed = [value for value in allowed if values.is_writable(value)]
        if not allowed:
            self.fail(path, "it admits no value that can be written")
        if "enum" in node.output:
            node.demand({"enum": allowed})
        else:
            node.output["enum"] = allowed

    def _count(self, node: Node, keyword: str) -> None:
        node.output[keyword] = values.count(node.source[keyword], node.path, keyword, self.fail)

    def _bound(self, node: Node, keyword: str) -> None:
        integers_only = "number" not in types_of({"type": node.source.get("type", "number")})
        bound = values.bound(
            node.source,
            keyword,
            integers_only=integers_only,
            is_draft4=self.draft is SchemaVersion.D4,
            path=node.path,
            fail=self.fail,
        )
        if bound is not None:
            node.narrow(*bound)

    def _multiple(self, node: Node, keyword: str) -> None:
        node.output[keyword] = values.multiple(node.source[keyword], node.path, self.fail)

    def _pattern(self, node: Node, keyword: str) -> None:
        node.match(self.pattern_text(node.source[keyword], node.path))

    def pattern_text(self, pattern: object, path: str) -> str:
        if not isinstance(pattern, str):
            self.fail(path, "a pattern must be a string")
        try:
            return translate(pattern, in_json=True)
        except RegexError as error:
            self.fail(path, f"the pattern cannot be honoured: {error}")

    def _format(self, node: Node, keyword: str) -> None:
        name = node.source["format"]
        types = types_of({"type": node.source.get("type", sorted(ALL_TYPES))})
        if name in INTEGER_FORMATS and "string" not in types:
            low, high = INTEGER_FORMATS[name]
            node.narrow("minimum", low)
            node.narrow("maximum", high)
        elif name in STRING_FORMATS:
            node.match(f"^(?:{STRING_FORMATS[name]})$")
        elif name not in FREE_FORMATS:
            known = ", ".join(sorted({*STRING_FORMATS, *INTEGER_FORMATS, *FREE_FORMATS}))
            self.fail(node.path, f"format {json.dumps(name)} is not supported; of: {known}")

    def _required(self, node: Node, keyword: str) -> None:
        names = node.source["required"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.fail(node.path, "'required' must be a list of names")
        node.output["required"] = list(dict.fromkeys(names))

    def _num_properties(self, node: Node, keyword: str) -> None:
        count = values.count(node.source[keyword], node.path, keyword, self.fail)
        implied, enforced, advice = values.property_limit(node.source, keyword, count)
        if enforced and not implied:
            node.output[keyword] = count
        elif not implied:
            self.fail(node.path, f"keyword '{keyword}' is not supported here; {advice}")


# The keywords of a rule about the names of an object, without rules about values.
CLOSING = ("patternProperties", "additionalProperties")
RULES: dict[str, Callable[[_Rewriting, dict[str, Any], str], Schema]] = {
    **CONDITIONS,
    "unevaluatedItems": unevaluated_items,
    "unevaluatedProperties": unevaluated_properties,
}
APPLIED_LAST = frozenset({"$ref", "allOf", "anyOf", "oneOf", "const", "enum"})
HANDLERS: dict[str, Callable[[_Rewriting, Node, str], None]] = {
    "$ref": _Rewriting._reference,
    "$dynamicRef": _Rewriting._reference,
    "$recursiveRef": _Rewriting._reference,
    "allOf": _Rewriting._list,
    "anyOf": _Rewriting._list,
    "oneOf": _Rewriting._list,
    "prefixItems": _Rewriting._prefix_items,
    "items": _Rewriting._items,
    "additionalItems": _Rewriting._items,
    "properties": _Rewriting._map,
    "patternProperties": _Rewriting._map,
    "additionalProperties": _Rewriting._part,
    "required": _Rewriting._required,
    "minProperties": _Rewriting._num_properties,
    "maxProperties": _Rewriting._num_properties,
    "type": _Rewriting._type,
    "const": _Rewriting._enumeration,
    "enum": _Rewriting._enumeration,
    "minItems": _Rewriting._count,
    "maxItems": _Rewriting._count,
    "minLength": _Rewriting._count,
    "maxLength": _Rewriting._count,
    "minimum": _Rewriting._bound,
    "maximum": _Rewriting._bound,
    "exclusiveMinimum": _Rewriting._bound,
    "exclusiveMaximum": _Rewriting._bound,
    "multipleOf": _Rewriting._multiple,
    "pattern": _Rewriting._pattern,
    "format": _Rewriting._format,
}
