"""JSON schemas from other projects: the official test suite, and schemas of real tools.

The suite is part of the source distribution of `jsonschema`, which is downloaded once. The schemas
of real tools come with the installed `check-jsonschema`. `supported_schemas` are those that a
client could send: small enough, supported as a whole, and compiled in time.
"""

import asyncio
import importlib.metadata
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.grammar.checker import GrammarChecker
from engine.core.grammar.spec import grammar_text, unchecked_places
from engine.core.interfaces.backend import GrammarSpec

CACHE = Path.home() / ".cache" / "engine" / "tests"
SUITE_DRAFTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
DEFINITION_KEYWORDS = ("definitions", "$defs")

NamedSchema = tuple[str, Any]


def suite_folder() -> Path:
    """The suite's files for both drafts, downloaded once."""
    version = importlib.metadata.version("jsonschema")
    folder = CACHE / f"json-schema-test-suite-{version}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--no-binary", "jsonschema", "-d", str(CACHE)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", *options, f"jsonschema=={version}"],
        check=True,
    )
    partial = CACHE / f"{folder.name}.partial"
    with tarfile.open(CACHE / f"jsonschema-{version}.tar.gz") as archive:
        for member in archive:
            _, _, name = member.name.partition("/json/tests/")
            content = archive.extractfile(member)
            if name.startswith(tuple(SUITE_DRAFTS)) and content is not None:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).write_bytes(content.read())
    return partial.rename(folder)


@cache
def suite_schemas() -> list[NamedSchema]:
    """Every schema of the suite, including the optional parts; each names its draft."""
    found = []
    for draft, uri in SUITE_DRAFTS.items():
        for path in sorted((suite_folder() / draft).rglob("*.json")):
            for group in json.loads(path.read_text(encoding="utf-8")):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": uri, **schema}
                found.append((f"{draft}/{path.stem}: {group['description']}", schema))
    return found


@cache
def real_schemas() -> list[NamedSchema]:
    """The schemas of real tools, and each of their definitions and properties as a schema."""
    folder = resources.files("check_jsonschema.builtin_schemas") / "vendor"
    found: list[NamedSchema] = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            schema = json.loads(file.read_text(encoding="utf-8"))
            found.append((file.name, schema))
            found += _parts(file.name, schema)
    return found


def _parts(name: str, document: dict[str, Any]) -> Iterator[NamedSchema]:
    for keyword in (*DEFINITION_KEYWORDS, "properties"):
        for part, schema in document.get(keyword, {}).items():
            if isinstance(schema, dict):
                yield f"{name}#/{keyword}/{part}", _alone(schema, document)


def _alone(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema as a separate document, with only the definitions that it needs."""
    needed: dict[str, dict[str, Any]] = {keyword: {} for keyword in DEFINITION_KEYWORDS}
    pending = [schema]
    while pending:
        for reference in _references(pending.pop()):
            _, _, pointer = reference.partition("#/")
            keyword, _, rest = pointer.partition("/")
            key = rest.split("/")[0].replace("~1", "/").replace("~0", "~")
            if (
                keyword in needed
                and key in document.get(keyword, {})
                and key not in needed[keyword]
            ):
                needed[keyword][key] = document[keyword][key]
                pending.append(document[keyword][key])
    definitions = {keyword: parts for keyword, parts in needed.items() if parts}
    head = {"$schema": document["$schema"]} if "$schema" in document else {}
    return {**head, **schema, **definitions}


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, part in value.items():
            if key == "$ref" and isinstance(part, str):
                yield part
            else:
                yield from _references(part)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part)


@cache
def supported_schemas() -> list[NamedSchema]:
    """The supported schemas of both sources, with their names."""
    return asyncio.run(supported_among([*suite_schemas(), *real_schemas()]))


async def supported_among(schemas: list[NamedSchema]) -> list[NamedSchema]:
    checker = GrammarChecker()
    supported = []
    for name, schema in schemas:
        spec = GrammarSpec(kind="json_schema", source=json.dumps(schema), param="schema")
        if unchecked_places(spec):
            continue
        try:
            await checker.check(grammar_text(spec), spec.param)
        except InvalidRequestError:
            continue
        supported.append((name, schema))
    await checker.close()
    return supported
