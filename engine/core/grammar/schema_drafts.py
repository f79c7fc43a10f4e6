"""Detects the JSON Schema draft of a document and resolves its references.

References must point into the same document; nothing is ever fetched. An `$id` below the root is
refused: it would change the base of references, and validators differ in how they treat that.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import NoReturn, TypeAlias
from urllib.parse import unquote

# Type of a function that raises an error. Its arguments are the path of a schema and what is wrong
# with that schema.
Fail: TypeAlias = Callable[[str, str], NoReturn]


class SchemaVersion(Enum):
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
        if address not in ("", self._own_address) or fragment[:1] not in ("", "/"):
            self._fail(
                path,
                "keyword '$ref' is only supported with a path in the same schema, as in "
                '"#/$defs/name"',
            )
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

    def _moves_base(self, schema: dict[str, object]) -> bool:
        own = schema.get(self._id_keyword)
        return isinstance(own, str) and not own.startswith("#")
