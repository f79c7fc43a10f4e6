"""Grammars and schemas made to hurt (SEC-16), and many different ones (SEC-17; T1, T2).

Each is refused or compiled, and the next one works.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.core.errors import InvalidRequestError
from engine.core.grammar.checker import MAX_VERDICTS, GrammarChecker
from engine.core.grammar.spec import grammar_text
from engine.core.interfaces.backend import GrammarSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one checker survives all of them

MAX_GROWTH_BYTES = 10 << 20
NESTING = 30_000  # 60,000 brackets fill the size that is allowed


def nested(opening: str, inside: str, closing: str, depth: int = NESTING) -> str:
    return opening * depth + inside + closing * depth


def deep_schema(keyword: str, depth: int) -> str:
    return nested('{"' + keyword + '":', "true", "}", depth)


REGEX_BOMBS = {
    "nested groups": nested("(", "a", ")"),
    "nested non-capturing": nested("(?:", "a", ")", 15_000),
    "nested classes": "[" * NESTING,
    "nested repeats": nested("(", "a", "*)", 20_000),
    "plus after anchor": "^+x",
    "star of star": "(a*)*",
    "catastrophic": "(a+)+$",
    "alternation": "(a|a)*(a|aa)+$",
    "counted": "a{1,1000000000}",
    "counted digits": "a{1," + "9" * 60_000 + "}",
    "counted product": "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}",
    "far apart": "(a|b)*a(a|b){500}",
    "wide": "|".join(f"w{n}" for n in range(9_000)),
    "open braces": "{" * 60_000,
    "quantifiers": "a" + "?" * 60_000,
    "unicode classes": r"[\W\S\D]{1000}" * 4_000,
    "backslashes": "\\" * 60_000,
}
SCHEMA_BOMBS = {
    "not JSON": "{" * 60_000,
    "deep arrays": nested("[", "", "]"),
    "deep items": deep_schema("items", 5_000),
    "items at the limit": deep_schema("items", 99),
    "itself": '{"$ref": "#"}',
    "itself in allOf": '{"allOf": [{"$ref": "#"}, {"$ref": "#"}]}',
    "endless": '{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}',
    "tree": '{"type":"array","items":{"$ref":"#"}}',
    "pattern and format": '{"type":"string","pattern":"^(a|b)*a(a|b){50}$","format":"uri"}',
    "enum": json.dumps({"enum": [f"w{n}" for n in range(6_000)]}),
    "enum of objects": json.dumps({"enum": [{"a": n} for n in range(4_000)]}),
    "large counts": '{"type":"array","minItems":2147483647,"items":{"minLength":2147483647}}',
    "exponent": '{"maximum": 1e999}',
    "digits": '{"maximum": ' + "9" * 60_000 + "}",
    "properties": json.dumps({"properties": {f"p{n}": {} for n in range(4_000)}}),
    "required": json.dumps({"type": "object", "required": [f"p{n}" for n in range(5_000)]}),
    "pattern properties": json.dumps({"patternProperties": {f"^{n}": {} for n in range(900)}}),
    "many patterns": json.dumps({"allOf": [{"pattern": f"(a|b)*a.{{{n}}}"} for n in range(40)]}),
    "unions of unions": json.dumps({"allOf": [{"anyOf": [{"minimum": 1}, {"const": 0}]}] * 900}),
    "choices of choices": json.dumps({"oneOf": [{"const": n} for n in range(3_000)]}),
    "chain": json.dumps(
        {
            "$ref": "#/$defs/0",
            "$defs": {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(900)}
            | {"900": {}},
        }
    ),
    "chain in place": json.dumps(
        {
            "$ref": "#/$defs/0",
            "$defs": {str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(200)}
            | {"200": {}},
        }
    ),
    "conditions in conditions": nested('{"if":', '{"const":1}', ',"then":{"const":2}}', 80),
    "exclusions of exclusions": nested('{"not":{"oneOf":[', '{"const":1}', ",{}]}}", 40),
    "items in items": nested('{"contains":', '{"const":1}', ',"maxContains":2}', 90),
    "items in items in an enum": nested(
        '{"contains":', json.dumps({"enum": list(range(9_000))}), ',"maxContains":3}', 9
    ),
    "permutations": json.dumps(
        [{"items": {"enum": ["x" * 2_000 + str(n) for n in range(5)]}, "uniqueItems": True}] * 4
    ).replace("[{", '{"allOf":[{', 1) + "}",
    "numbers": '{"uniqueItems":true,"items":{"type":"integer","minimum":0,"maximum":9e15}}',
    "dependent names": json.dumps({"dependentRequired": {f"p{n}": ["a"] for n in range(3_000)}}),
    "excluded strings": json.dumps({"not": {"enum": [f"w{n}" * 9 for n in range(1_500)]}}),
    "many unevaluated": json.dumps(
        {
            "allOf": [{"anyOf": [{"properties": {"a": {}}}, {}]}] * 900,
            "unevaluatedProperties": False,
        }
    ),
    "unevaluated in itself": '{"unevaluatedProperties":{"$ref":"#"},"anyOf":[{"$ref":"#"},{}]}',
    "anchors": json.dumps({"$ref": "#a", "allOf": [{"$anchor": "a"}] * 2_000}),
    "names of names": '{"propertyNames":{"$ref":"#/propertyNames"}}',
    "few of few": '{"items":{"$ref":"#/items"},"uniqueItems":true}',
    "null characters": '{"const": "' + "\\u0000" * 9_000 + '"}',
}  # fmt: skip
GRAMMAR_BOMBS = {
    "lark nested": "start: " + nested("(", '"a"', ")"),
    "lark star of star": 'start: ("a"*)*',
    "lark left recursion": 'start: start "a" | "b"',
    "lark empty recursion": "start: start",
    "lark ambiguous": 'start: start start | "a"',
    "lark counted": 'start: "a"{1,1000000000}',
    "lark product": 'start: ((("a"{1,1000}){1,1000}){1,1000}){1,1000}',
    "lark terminals": "start: A\n" + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(999)),
    "lark and": "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{n}}}/" for n in range(1, 30)),
    "lark json": 'start: %json {"$ref": "#"}',
    "lark json deep": "start: %json " + deep_schema("items", 5_000),
    "lark text": "x" * 60_000,
    "lark bytes": "\x00\x01\x02" * 1_000,
    "gbnf nested": "root ::= " + nested("(", '"a"', ")"),
    "gbnf star of star": 'root ::= ("a"*)*',
    "gbnf left recursion": 'root ::= root "a" | "b"',
    "gbnf empty recursion": "root ::= root",
    "gbnf counted": 'root ::= "a"{1,1000000000}',
    "gbnf product": "root ::= " + nested("(", '"a"', "){1,1000}", 90),
    "gbnf chain": "root ::= r0\n"
    + "".join(f'r{n} ::= "a" r{n + 1}\n' for n in range(3_000))
    + 'r3000 ::= "x"\n',
    "gbnf doubling": "root ::= r0\n"
    + "".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(60))
    + 'r60 ::= "x"\n',
    "gbnf alternatives": "root ::= " + " | ".join(f'"w{n}"' for n in range(6_000)),
    "gbnf comments": "root ::= " + "#" * 60_000,
}
BOMBS = [
    *(("regex", name, source) for name, source in REGEX_BOMBS.items()),
    *(("json_schema", name, source) for name, source in SCHEMA_BOMBS.items()),
    *(("grammar", name, source) for name, source in GRAMMAR_BOMBS.items()),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    await checker.close()


async def refusal(checker: GrammarChecker, kind: Any, source: str) -> str | None:
    try:
        spec = GrammarSpec(kind=kind, source=source, param="it")
        text = await asyncio.to_thread(grammar_text, spec)
        await checker.check(text, "it")
    except InvalidRequestError as error:
        assert error.status == 400
        assert error.param == "it"
        assert error.message.startswith("it")
        assert len(error.message) < 1_000
        return error.message
    return None


@pytest.mark.parametrize(("kind", "name", "source"), BOMBS, ids=[bomb[1] for bomb in BOMBS])
async def test_grammar_bomb_is_refused_and_the_checker_survives(
    checker: GrammarChecker, kind: str, name: str, source: str
) -> None:
    assert len(source.encode()) <= 64 * 1024, "or it would only be refused for its size"
    await refusal(checker, kind, source)
    assert await refusal(checker, "choice", json.dumps([name])) is None


def resident_bytes(pid: str) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


async def test_many_schemas_keep_memory_bounded(checker: GrammarChecker) -> None:
    async def send(first: int, count: int) -> None:
        for number in range(first, first + count):
            schema = {"type": "object", "properties": {f"name_{number}": {"type": "string"}}}
            assert await refusal(checker, "json_schema", json.dumps(schema)) is None

    await send(0, 200)
    child = checker.child_pid
    before = [resident_bytes("self"), resident_bytes(str(child))]
    await send(200, 1_500)
    assert checker.child_pid == child
    assert checker.num_verdicts == MAX_VERDICTS
    after = [resident_bytes("self"), resident_bytes(str(child))]
    assert all(b - a < MAX_GROWTH_BYTES for a, b in zip(before, after, strict=True))
