"""Detects the JSON Schema draft of a document and resolves its references.

References must point into the same document; nothing is ever fetched. An `$id` below the root is
refused: it would change the base of references, and validators differ in how they treat that.
"""

from collections.abc import Callable
from enum import IntEnum, auto
from typing import NoReturn, TypeAlias
from urllib.parse import unquote

# Type of a function that raises an error. Its arguments are the path of a schema and what is wrong
# with that schema.
Fail: TypeAlias = Callable[[str, str], NoReturn]


class SchemaVersion(IntEnum):
    D4 = auto()
    D6 = auto()
    D7 = auto()
    D2019 = auto()
    D2020 = auto()


_DRAFTS = {
    "json-schema.org/draft-04/schema": SchemaVersion.D4,
    "json-schema.org/draft-06/schema": SchemaVersion.D6,
    "json-schema.org/draft-07/schema": SchemaVersion.D7,
    "json-schema.org/draft/2019-09/schema": SchemaVersion.D2019,
    "json-schema.org/draft/2020-12/schema": SchemaVersion.D2020,
}


# Keywords whose values are objects of schemas, and keywords whose values are schemas or lists of
# schemas. Anchors are only found there.
_SCHEMA_MAPS = frozenset(
    {"$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies"}
)
_SCHEMA_PARTS = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "prefixItems", "items", "contains"}
    | {"additionalItems", "additionalProperties", "propertyNames"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)


def draft_of(document: object, param: str, fail: Fail) -> SchemaVersion:
    """The JSON Schema draft that `$schema` names; draft 2020-12 if there is no `$schema`."""
    if not isinstance(document, dict) or "$schema" not in document:
        return SchemaVersion.D2020
    name = document["$schema"]
    if not isinstance(name, str):
        fail(param, "'$schema' must be a string")
    draft = _DRAFTS.get(name.removeprefix("https://").removeprefix("http://").removesuffix("#"))
    if draft is None:
        fail(param, "'$schema' must name draft 4, 6, 7, 2019-09 or 2020-12 of JSON Schema")
    return draft


class Resolver:
    """Resolves the `$ref` references of one schema document."""

    def __init__(self, document: object, draft: SchemaVersion, fail: Fail) -> None:
        self._document = document
        self._fail = fail
        self._id_keyword = "id" if draft is SchemaVersion.D4 else "$id"
        own = document.get(self._id_keyword, "") if isinstance(document, dict) else ""
        self._anchors: dict[str, list[tuple[tuple[str, ...], object]]] | None = None
        self._own_address = own.removesuffix("#") if isinstance(own, str) else ""

    def check_identifier(self, schema: dict[str, object], path: str) -> None:
        if schema is not self._document and self._moves_base(schema):
            self._fail(path, f"keyword '{self._id_keyword}' is only supported at the root")

    def resolve(self, reference: object, path: str) -> tuple[tuple[str, ...], object]:
        """The path in the document that a `$ref` points to, and the schema at this path."""
        if not isinstance(reference, str):
            self._fail(path, "'$ref' must be a string")
        address, _, fragment = reference.partition("#")
        fragment = unquote(fragment)
        if address not in ("", self._own_address):
            self._fail(
                path,
                "keyword '$ref' is only supported with a place in the same schema, as in "
                '"#/$defs/name"',
            )
        if fragment[:1] not in ("", "/"):
            return self._anchored(fragment, reference, path)
        place = tuple(
            part.replace("~1", "/").replace("~0", "~") for part in fragment.split("/")[1:]
        )
        found = self._document
        for part in place:
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and int(part[:6]) < len(found):
                found = found[int(part[:6])]
            else:
                self._fail(path, f"'$ref' points at nothing: {reference}")
            if isinstance(found, dict) and self._moves_base(found):
                self._fail(path, "'$ref' leads through a schema with an address of its own")
        return place, found

    def _anchored(self, name: str, reference: str, path: str) -> tuple[tuple[str, ...], object]:
        """The schema with this anchor, and its path."""
        if self._anchors is None:
            self._anchors = {}
            self._find_anchors(self._anchors)
        places = self._anchors.get(name, [])
        if len(places) != 1:
            found = "nothing" if not places else "several schemas"
            self._fail(path, f"'$ref' points at {found}: {reference}")
        return places[0]

    def _find_anchors(self, found: dict[str, list[tuple[tuple[str, ...], object]]]) -> None:
        """Find the schemas with anchors, in all places that can have schemas."""
        pending: list[tuple[tuple[str, ...], object]] = [((), self._document)]
        while pending:
            place, schema = pending.pop()
            if not isinstance(schema, dict) or (place and self._moves_base(schema)):
                continue
            names = [schema.get("$anchor"), schema.get("$dynamicAnchor")]
            identifier = schema.get(self._id_keyword)
            if isinstance(identifier, str) and identifier.startswith("#"):  # of older drafts
                names.append(identifier[1:])
            for name in {name for name in names if isinstance(name, str)}:
                found.setdefault(name, []).append((place, schema))
            for keyword, value in schema.items():
                if keyword in _SCHEMA_MAPS and isinstance(value, dict):
                    pending += [((*place, keyword, key), part) for key, part in value.items()]
                elif keyword in _SCHEMA_PARTS and isinstance(value, list):
                    pending += [((*place, keyword, str(i)), part) for i, part in enumerate(value)]
                elif keyword in _SCHEMA_PARTS:
                    pending.append(((*place, keyword), value))

    def _moves_base(self, schema: dict[str, object]) -> bool:
        own = schema.get(self._id_keyword)
        return isinstance(own, str) and not own.startswith("#")
