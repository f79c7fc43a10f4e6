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
from engine.core.grammar.regex_dialect import RegexError, admits_long_text, translate
from engine.core.grammar.schema_drafts import Resolver, SchemaVersion, draft_of
from engine.core.grammar.schema_logic import (
    ALL_TYPES,
    REF_PREFIX,
    Disjoint,
    Satisfiable,
    Schema,
    has_loop,
    references,
    types_of,
)
from engine.core.grammar.schema_values import (
    ANNOTATION_PREFIXES,
    ANNOTATIONS,
    FREE_FORMATS,
    INTEGER_FORMATS,
    JSON_STYLE,
    REFUSED,
    STRING_FORMATS,
    WITHOUT_EFFECT,
)

MAX_NESTING = 100
MAX_DEFINITIONS = 1_000

# This error is for `patternProperties` that match only a few names. When all these names are used,
# the grammar would still demand another name, and the output could not go on.
SHORT_NAMES = (
    "keyword 'patternProperties' is not supported with a pattern that limits the length of names, "
    "where other properties are declared; list the names in 'properties'"
)


def compile_schema(schema: object, param: str) -> dict[str, Any]:
    """Rewrite a schema for llguidance. The result can also be used after `%json` in a Lark grammar.

    Error messages start with `param`, the request parameter that contains the schema, and a path in
    the schema.
    """
    return _Rewriting(schema, param).run()


class _Rewriting:
    """Rewrites one schema document for llguidance."""

    def __init__(self, document: object, param: str) -> None:
        self._param = param
        self._document = document
        self._draft = draft_of(document, param, self._fail)
        self._resolver = Resolver(document, self._draft, self._fail)
        self._definitions: dict[str, Schema] = {}
        self._pending: list[tuple[str, object, str]] = []
        self._disjoint = Disjoint(self._definitions)
        self._keys: dict[tuple[str, ...], str] = {}  # path in the document -> definition key
        self._intersects = False  # whether two schemas apply to the same value, as in `allOf`
        # Path of a `patternProperties` whose pattern matches only names of limited length.
        self._short_names: str | None = None
        # Nodes with `oneOf`, and their paths. It is not yet proved that their branches are
        # disjoint.
        self._exclusive: list[tuple[dict[str, Any], str]] = []

    def run(self) -> dict[str, Any]:
        values.check_text(self._document, self._param, MAX_NESTING, self._fail)
        root = self._schema(self._document, self._param)
        while self._pending:
            key, schema, path = self._pending.pop()
            self._definitions[key] = self._schema(schema, path)
        if has_loop(self._definitions):
            self._fail(self._param, "a '$ref' leads back to itself without any value in between")
        for node, path in self._exclusive:
            self._prove_exclusive(node, path)
        if self._short_names is not None and self._intersects:
            self._fail(self._short_names, SHORT_NAMES)
        satisfiable = Satisfiable(self._definitions)
        if not satisfiable.admits(root):
            self._fail(self._param, "no finite JSON value matches this schema")
        root = satisfiable.prune(root)
        used = self._used_definitions(root, satisfiable)
        result = {} if isinstance(root, bool) else dict(root)
        if used:
            result["$defs"] = used
        return {"x-guidance": JSON_STYLE, **result}

    def _used_definitions(self, root: Schema, satisfiable: Satisfiable) -> dict[str, Schema]:
        used: dict[str, Schema] = {}
        pending = references(root)
        while pending:
            key = pending.pop()
            used[key] = satisfiable.prune(self._definitions[key])
            pending |= references(used[key]) - used.keys()
        return used

    def _fail(self, path: str, problem: str) -> NoReturn:
        raise InvalidRequestError(f"{path}: {problem}.", param=self._param)

    def _schema(self, schema: object, path: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._fail(path, "a schema must be an object or a boolean")
        asserted: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in HANDLERS:
                asserted[keyword] = value
            else:
                self._pass_or_refuse(keyword, value, path)
        self._resolver.check_identifier(schema, path)
        node = _Node(asserted, path)
        if "type" in asserted:  # handled first, because other keywords depend on it
            self._type(node, "type")
        for keyword in asserted:
            HANDLERS[keyword](self, node, keyword)
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
            self._fail(path, "no JSON value matches both its type and its values")
        return node.output

    def _pass_or_refuse(self, keyword: str, value: Any, path: str) -> None:
        if keyword in ANNOTATIONS or keyword.startswith(ANNOTATION_PREFIXES):
            return
        if keyword not in REFUSED:
            self._fail(path, f"keyword '{keyword}' is not known; nothing would enforce it")
        if json.dumps(value) not in WITHOUT_EFFECT.get(keyword, ()):
            self._fail(path, f"keyword '{keyword}' is not supported; {REFUSED[keyword]}")

    # Handlers of keywords that contain or reference schemas.

    def _reference(self, node: "_Node", keyword: str) -> None:
        place, schema = self._resolver.resolve(node.source[keyword], node.path)
        key = self._keys.get(place)
        if key is None:
            if len(self._keys) >= MAX_DEFINITIONS:
                self._fail(node.path, f"there are more than {MAX_DEFINITIONS} references")
            key = self._keys[place] = str(len(self._keys))
            self._pending.append((key, schema, ".".join([self._param, *place])))
        node.output["$ref"] = REF_PREFIX + key

    def _list(self, node: "_Node", keyword: str) -> None:
        parts = node.source[keyword]
        if not isinstance(parts, list) or not parts:
            self._fail(node.path, f"'{keyword}' must be a list of schemas that is not empty")
        path = f"{node.path}.{keyword}"
        compiled = [self._schema(part, f"{path}[{i}]") for i, part in enumerate(parts)]
        if keyword == "oneOf":
            self._exclusive.append((node.output, node.path))
            node.output["oneOf"] = compiled
        elif keyword == "allOf":
            node.demand(*compiled)
        else:
            node.output[keyword] = compiled

    def _prove_exclusive(self, node: dict[str, Any], path: str) -> None:
        branches = node.pop("oneOf")
        if not self._disjoint.all_pairs(branches):
            self._fail(
                path,
                "keyword 'oneOf' is not supported where several of its branches may match at "
                "once; use anyOf, or give each branch a required property with its own const",
            )
        if "anyOf" in node:
            node.setdefault("allOf", []).append({"anyOf": branches})
        else:
            node["anyOf"] = branches

    def _map(self, node: "_Node", keyword: str) -> None:
        parts = node.source[keyword]
        if not isinstance(parts, dict):
            self._fail(node.path, f"'{keyword}' must be an object of schemas")
        path = f"{node.path}.{keyword}"
        compiled = {name: self._schema(part, f"{path}.{name}") for name, part in parts.items()}
        if keyword == "patternProperties":
            compiled = {self._pattern_text(name, path): compiled[name] for name in compiled}
            if not all(map(admits_long_text, compiled)):
                if node.source.get("properties") or node.source.get("required"):
                    self._fail(path, SHORT_NAMES)
                self._short_names = path
        node.output[keyword] = compiled

    def _part(self, node: "_Node", keyword: str) -> None:
        node.output[keyword] = self._schema(node.source[keyword], f"{node.path}.{keyword}")

    def _items(self, node: "_Node", keyword: str) -> None:
        """Rewrite `items` and `additionalItems` of older drafts to `prefixItems` and `items`."""
        items = node.source.get("items")
        if keyword == "items" and not isinstance(items, list):
            self._part(node, "items")
        elif self._draft is SchemaVersion.D2020:
            hint = "use prefixItems and items" if keyword == "items" else "use items"
            self._fail(node.path, f"'{keyword}' in this form is not in draft 2020-12; {hint}")
        elif keyword == "items" and items:
            path = f"{node.path}.items"
            node.output["prefixItems"] = [
                self._schema(part, f"{path}[{i}]") for i, part in enumerate(items)
            ]
        elif keyword == "additionalItems" and isinstance(items, list):
            path = f"{node.path}.additionalItems"
            node.output["items"] = self._schema(node.source[keyword], path)

    def _prefix_items(self, node: "_Node", keyword: str) -> None:
        if self._draft is not SchemaVersion.D2020:
            self._fail(node.path, "'prefixItems' needs \"$schema\" to name draft 2020-12")
        self._list(node, keyword)

    # Handlers of keywords that constrain values directly.

    def _type(self, node: "_Node", keyword: str) -> None:
        named = node.source["type"]
        names = [named] if isinstance(named, str) else named
        if not isinstance(names, list) or not names or not all(n in ALL_TYPES for n in names):
            self._fail(node.path, f"'type' must be of {', '.join(sorted(ALL_TYPES))}")
        node.output["type"] = named

    def _enumeration(self, node: "_Node", keyword: str) -> None:
        given = node.source[keyword]
        if keyword == "enum" and not isinstance(given, list):
            self._fail(node.path, "'enum' must be a list")
        path = f"{node.path}.{keyword}"
        allowed = [
            values.exact(value, path, self._fail)
            for value in (given if keyword == "enum" else [given])
        ]
        allowed = [value for value in allowed if values.is_writable(value)]
        if not allowed:
            self._fail(path, "it admits no value that can be written")
        if "enum" in node.output:
            node.demand({"enum": allowed})
        else:
            node.output["enum"] = allowed

    def _count(self, node: "_Node", keyword: str) -> None:
        node.output[keyword] = values.count(node.source[keyword], node.path, keyword, self._fail)

    def _bound(self, node: "_Node", keyword: str) -> None:
        integers_only = "number" not in types_of({"type": node.source.get("type", "number")})
        bound = values.bound(
            node.source,
            keyword,
            integers_only=integers_only,
            is_draft4=self._draft is SchemaVersion.D4,
            path=node.path,
            fail=self._fail,
        )
        if bound is not None:
            node.narrow(*bound)

    def _multiple(self, node: "_Node", keyword: str) -> None:
        node.output[keyword] = values.multiple(node.source[keyword], node.path, self._fail)

    def _pattern(self, node: "_Node", keyword: str) -> None:
        node.match(self._pattern_text(node.source[keyword], node.path))

    def _pattern_text(self, pattern: object, path: str) -> str:
        if not isinstance(pattern, str):
            self._fail(path, "a pattern must be a string")
        try:
            return translate(pattern, in_json=True)
        except RegexError as error:
            self._fail(path, f"the pattern cannot be honoured: {error}")

    def _format(self, node: "_Node", keyword: str) -> None:
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
            self._fail(node.path, f"format {json.dumps(name)} is not supported; of: {known}")

    def _required(self, node: "_Node", keyword: str) -> None:
        names = node.source["required"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self._fail(node.path, "'required' must be a list of names")
        node.output["required"] = list(dict.fromkeys(names))

    def _num_properties(self, node: "_Node", keyword: str) -> None:
        count = values.count(node.source[keyword], node.path, keyword, self._fail)
        declared = values.declared_properties(node.source)
        if keyword == "minProperties":
            # The grammar allows that an undeclared name is repeated. So all undeclared names
            # together count as at most one property.
            implied = count <= declared.num_required
            enforced = count == 1 and (not declared.has_optional or declared.is_closed)
            advice = f"name {count} properties in 'required'"
        else:
            implied = declared.is_closed and count >= declared.num_declared
            enforced = not declared.has_optional
            advice = (
                "name all properties in 'required', or declare no more than that and set "
                "additionalProperties: false"
            )
        if enforced and not implied:
            node.output[keyword] = count
        elif not implied:
            self._fail(node.path, f"keyword '{keyword}' is not supported here; {advice}")


class _Node:
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


APPLIED_LAST = frozenset({"$ref", "allOf", "anyOf", "oneOf", "const", "enum"})
HANDLERS: dict[str, Callable[[_Rewriting, _Node, str], None]] = {
    "$ref": _Rewriting._reference,
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
