"""What of JSON Schema is honoured, and how what is not honoured is refused."""

import json
from typing import Any

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.grammar.child import byte_tokenizer, problem_of
from engine.core.grammar.schema_rules import compile_schema, unchecked_keywords
from engine.core.grammar.schema_values import ANNOTATIONS, REFUSED, WITHOUT_EFFECT
from engine.core.grammar.spec import grammar_text
from engine.core.interfaces.backend import GrammarSpec

DRAFT4 = "http://json-schema.org/draft-04/schema#"
DRAFT7 = "http://json-schema.org/draft-07/schema#"
STRING = {"type": "string"}


def accepts(schema: Any, text: str) -> bool:
    """Whether the grammar of `schema` takes all of `text`, and nothing need follow."""
    from llguidance import LLMatcher

    source = json.dumps(schema)
    grammar = grammar_text(GrammarSpec(kind="json_schema", source=source, param="schema"))
    tokenizer = byte_tokenizer()
    assert problem_of(grammar, tokenizer) is None
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def refusal(schema: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        compile_schema(schema, "schema")
    assert caught.value.param == "schema"
    return caught.value.message


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_an_unsupported_keyword_is_named_with_its_path(keyword: str) -> None:
    schema = {"properties": {"a": {"items": {keyword: {"type": "string"}}}}}
    assert refusal(schema).startswith(f"schema.properties.a.items: keyword '{keyword}' is not ")


@pytest.mark.parametrize("keyword", sorted(WITHOUT_EFFECT))
def test_unsupported_keywords_without_effect_are_accepted(keyword: str) -> None:
    for value in WITHOUT_EFFECT[keyword]:
        compile_schema({"type": "string", keyword: json.loads(value)}, "schema")


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS - {"$schema", "$id"}) + ["x-order"])
def test_annotation_keywords_are_ignored(keyword: str) -> None:
    assert accepts({"type": "integer", keyword: {}}, "1")


def test_unknown_keyword_is_refused() -> None:
    assert refusal({"minLenght": 3}) == (
        "schema: keyword 'minLenght' is not known; nothing would enforce it."
    )


def test_llguidance_options_in_a_schema_are_refused() -> None:
    schema = {"x-guidance": {"lenient": True, "whitespace_flexible": True}, "type": "array"}
    assert not accepts(schema, "[  ]")


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": ["string", "null"]}, ["null", '"a"'], ["1", "[]"]),
        ({"const": {"a": [1, True]}}, ['{"a": [1, true]}'], ['{"a": [1]}', "1"]),
        ({"enum": [1, "a", 2.5]}, ["1", '"a"', "2.5"], ["2", '"b"']),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"éé"', '"😀😀😀"'], ['"é"']),
        ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ['"ab"', '""']),
        ({"type": "string", "pattern": "a"}, ['"xax"'], ['"x"']),
        ({"type": "string", "pattern": "^a", "format": "date"}, [], ['"2024-01-01"', '"a"']),
        ({"type": "integer", "minimum": 2, "exclusiveMaximum": 4}, ["2", "3"], ["1", "4", "3.0"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.5", "3"], ["0", "0.0", "-1"]),
        ({"type": "number", "exclusiveMaximum": 100}, ["99.9", "99"], ["100", "100.0"]),
        ({"type": "number", "exclusiveMinimum": -1, "maximum": 0.95},
         ["-0.99", "0.9", "0.95"], ["-1", "0.96", "-0.99999999999999999999"]),
        ({"type": "number", "minimum": 100.00000000000001}, ["100.5"], ["100"]),
        ({"type": "integer", "multipleOf": 7}, ["14", "-7"], ["15"]),
        ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
         ["[null]", "[null, null]"], ["[]", "[null,null,null]", "[1]"]),
        ({"prefixItems": [STRING], "items": False}, ['["a"]', "[]"], ["[1]", '["a", 1]']),
        ({"type": "object", "properties": {"a": STRING}, "required": ["a"]},
         ['{"a": "x"}', '{"a":"x","b":1}'], ["{}", '{"a":1}']),
        ({"type": "object", "additionalProperties": {"type": "integer"}},
         ['{"x": 1}'], ['{"x": "y"}']),
        ({"type": "object", "properties": {"a": STRING}, "additionalProperties": False},
         ["{}", '{"a":""}'], ['{"b":1}']),
        ({"type": "object", "patternProperties": {"^i_": {"type": "integer"}}},
         ['{"i_a": 1}', '{"b": "x"}'], ['{"i_a": "x"}']),
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
        ({"type": "object", "maxProperties": 1}, ['{"a":1}', "{}"], ['{"a":1,"b":2}']),
        ({"anyOf": [{"type": "null"}, STRING]}, ["null", '"a"'], ["1"]),
        ({"allOf": [{"minimum": 3}, {"type": "integer"}]}, ["3"], ["2", '"a"']),
        ({"oneOf": [{"type": "null"}, STRING]}, ["null", '"a"'], ["1"]),
        ({"$ref": "#/$defs/a", "$defs": {"a": STRING}}, ['"a"'], ["1"]),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
         ['{"a": {"a": {}}}'], ['{"a": 1}', '{"b": {}}']),
        ({"type": "integer", "format": "int32"}, ["2147483647"], ["2147483648"]),
    ],
)  # fmt: skip
def test_supported_schema_keywords_are_enforced(
    schema: Any, valid: list[str], invalid: list[str]
) -> None:
    if valid:
        assert [accepts(schema, text) for text in valid] == [True] * len(valid)
        assert [accepts(schema, text) for text in invalid] == [False] * len(invalid)
    else:  # nothing matches, which only the compiler can see
        grammar = grammar_text(GrammarSpec(kind="json_schema", source=json.dumps(schema)))
        assert "Unsatisfiable" in (problem_of(grammar, byte_tokenizer()) or "")


OBJECT = {"type": "object"}
ONE_TO_THREE = {"type": "integer", "minimum": 1, "maximum": 3}
HAS_KIND = {"properties": {"kind": {"const": "x"}}, "required": ["kind"]}
NAMED = {"type": "object", "properties": {"a": STRING}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": ["string", "null"], "not": {"type": "null"}}, ['"a"'], ["null"]),
        (STRING | {"not": {"enum": ["ab", "a", "é"]}}, ['""', '"b"', '"abc"'], ['"a"', '"é"']),
        ({"type": "integer", "not": {"const": 3}}, ["2", "4", "-3"], ["3"]),
        ({"type": "integer", "not": {"minimum": 3}}, ["2"], ["3"]),
        ({"$schema": DRAFT4, "type": "integer", "not": {"minimum": 3, "exclusiveMinimum": True}},
         ["3"], ["4"]),
        ({"$schema": DRAFT7, "not": {"$ref": "#/definitions/a", "type": "null"},
          "definitions": {"a": {"type": "array"}}}, ["1", "{}"], ["null", "[]"][1:]),
        (STRING | {"not": {"minLength": 2}}, ['"a"'], ['"ab"']),
        ({"type": "integer", "oneOf": [{"minimum": 1}, {"maximum": 2}]}, ["0", "3"], ["1", "2"]),
        (OBJECT | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
         ['{"a": 1}', '{"b": 1, "c": 1}'], ["{}", '{"a": 1, "b": 1}']),
        (OBJECT | {"not": {"required": ["a"]}}, ["{}", '{"b": 1}'], ['{"a": 1}']),
        ({"type": "array", "not": {"items": STRING}}, ['[1]', '["a", 1]'], ["[]", '["a"]']),
        ({"type": "array", "not": {"contains": STRING}}, ["[]", "[1]"], ['["a"]', '[1, "a"]']),
        ({"not": {"anyOf": [{"type": "array"}, {"not": STRING}]}}, ['"a"'], ["[]", "1"]),
        ({"type": "boolean", "not": {"oneOf": [{"const": True}, {}]}}, ["true"], ["false"]),
        ({"not": {"const": {"a": [1]}}, "type": "object", "required": ["a"]},
         ['{"a": [1, 2]}', '{"a": 1}'], ['{"a": [1]}', "{}"]),
        ({"not": {"$ref": "#/$defs/list"}, "type": ["object", "null"],
          "$defs": {"list": {"anyOf": [{"type": "null"}, {
              "type": "object", "properties": {"next": {"$ref": "#/$defs/list"}}}]}}},
         ['{"next": 1}', '{"next": {"next": 1}}'], ["null", '{"next": {"next": null}}']),
        ({"type": "object", "if": HAS_KIND, "then": {"required": ["x"]},
          "else": {"required": ["y"]}, "properties": {"kind": STRING}},
         ['{"kind": "x", "x": 1}', '{"kind": "z", "y": 1}', '{"y": 1}'],
         ['{"kind": "x"}', '{"kind": "x", "y": 1}', '{"kind": "z", "x": 1}']),
        ({"type": "object", "dependentRequired": {"a": ["b"]}},
         ["{}", '{"b": 1}', '{"a": 1, "b": 2}'], ['{"a": 1}']),
        ({"type": "object", "dependentSchemas": {"a": {"properties": {"b": STRING}}}},
         ['{"b": 1}', '{"a": 1, "b": "x"}'], ['{"a": 1, "b": 1}']),
        ({"$schema": DRAFT7, "type": "object", "dependencies": {"a": ["b"], "c": False}},
         ["{}", '{"a": 1, "b": 2}'], ['{"a": 1}', '{"c": 1}']),
        ({"type": "array", "contains": STRING}, ['["a"]', '[1, "a", 2]'], ["[]", "[1]"]),
        ({"type": "array", "contains": STRING, "minContains": 2, "maxContains": 3},
         ['["a", 1, "b"]', '["a", "b", "c"]'], ['["a"]', '["a", "b", "c", "d"]']),
        ({"type": "array", "contains": STRING, "minContains": 0}, ["[]", "[1]"], ["1"]),
        ({"contains": STRING}, ["1", '"a"', '["a"]'], ["[]"]),
        ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
         ["[]", '["c", "a", "b"]'], ['["a", "a"]', '["a", "b", "a"]']),
        ({"type": "array", "items": ONE_TO_THREE, "uniqueItems": True, "minItems": 2},
         ["[3, 1]"], ["[1]", "[1, 1]"]),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}},
         ["{}", '{"b": 1}'], ['{"c": 1}', '{"a": 1, "c": 2}']),
        ({"type": "object", "propertyNames": {"pattern": "^[a-c]{1,2}$"},
          "additionalProperties": {"type": "integer"}},
         ["{}", '{"ab": 1}'], ['{"abc": 1}', '{"a": "x"}']),
        ({"type": "object", "propertyNames": {"maxLength": 2}, "properties": {"ab": STRING}},
         ['{"ab": "x", "c": 1}'], ['{"ab": 1}', '{"abc": 1}']),
        ({"type": "object", "propertyNames": {"not": {"enum": ["a", "id"]}}},
         ['{"b": 1}', '{"ida": 1}'], ['{"id": 1}', '{"a": 1}']),
        ({"type": "object", "propertyNames": False}, ["{}"], ['{"a": 1}']),
        ({"allOf": [NAMED], "unevaluatedProperties": False}, ['{"a": ""}'], ['{"a": "", "b": 1}']),
        ({"anyOf": [NAMED, {"type": "object", "properties": {"b": STRING}, "required": ["b"]}],
          "unevaluatedProperties": {"type": "null"}},
         ['{"a": ""}', '{"b": ""}', '{"a": "", "b": ""}', '{"a": "", "c": null}'],
         ['{"c": null}', '{"a": "", "c": 1}']),
        ({"allOf": [{"prefixItems": [STRING]}], "type": "array", "unevaluatedItems": False},
         ["[]", '["a"]'], ['["a", 1]']),
        ({"$ref": "#name", "$defs": {"a": STRING | {"$anchor": "name"}}}, ['"a"'], ["1"]),
        ({"$schema": DRAFT7, "$ref": "#n", "definitions": {"a": STRING | {"$id": "#n"}}},
         ['"a"'], ["1"]),
        ({"$dynamicRef": "#n", "$defs": {"a": STRING | {"$dynamicAnchor": "n"}}}, ['"a"'], ["1"]),
        (STRING | {"pattern": r"^\p{Lu}[^\p{L}\p{Script=Greek}]$"}, ['"É1"'], ['"é1"', '"Éa"']),
    ],
)  # fmt: skip
def test_conditions_are_enforced(schema: Any, valid: list[str], invalid: list[str]) -> None:
    for text in valid:
        assert accepts(schema, text), text
    for text in invalid:
        assert not accepts(schema, text), text


def test_many_conditions_on_one_constant_compile() -> None:
    """As schemas of forms have them. The number of combinations would be exponential."""
    kinds = [f"kind_{n}" for n in range(30)]
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": kinds}},
        "required": ["kind"],
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                "then": {"required": [f"of_{kind}"]},
                "else": {"properties": {f"of_{kind}": False}},
            }
            for kind in kinds
        ],
    }
    assert accepts(schema, '{"kind": "kind_7", "of_kind_7": 1}')
    for wrong in ('{"kind": "kind_7"}', '{"kind": "kind_7", "of_kind_7": 1, "of_kind_8": 1}'):
        assert not accepts(schema, wrong)
    del schema["properties"], schema["required"]
    assert accepts(schema, '{"x": 1}') and accepts(schema, '{"kind": "other", "x": 1}')
    assert not accepts(schema, '{"of_kind_7": 1}')
    assert not accepts(schema, '{"kind": "kind_8", "of_kind_7": 1}')


@pytest.mark.parametrize(
    ("items", "is_checked"),
    [
        (STRING, False),
        ({"$ref": "#/$defs/few"}, True),
        ({"enum": list("abcdefgh")}, False),
        ({"type": "boolean"}, True),
        ({"type": "integer", "minimum": 0}, False),
    ],
)
def test_uniqueness_that_no_grammar_can_enforce_is_reported(items: Any, is_checked: bool) -> None:
    """As for pydantic's `set[str]`, which is no reason to refuse a schema."""
    schema = {
        "properties": {"tags": {"type": "array", "items": items, "uniqueItems": True}},
        "$defs": {"few": {"enum": ["a", "b", "a"]}},
    }
    place = "schema.properties.tags.uniqueItems"
    assert unchecked_keywords(schema, "schema") == ([] if is_checked else [place])
    assert accepts(schema, '{"tags": []}')


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("date", ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "0000-01-01"]),
        ("time", ["23:59:59Z", "00:00:00.5+01:00"], ["24:00:00Z", "23:59:60Z", "10:00:00"]),
        ("date-time", ["2024-02-29T12:00:00Z"], ["2023-02-29T12:00:00Z", "2024-01-01"]),
        ("duration", ["P1Y2M3DT4H5M6S", "PT1S", "P2W"], ["P", "1D", "P1Y3D"]),
        ("email", ["a.b@example.org"], ["a", "@b.c", "a@"]),
        ("hostname", ["a.example.org"], ["-a", "a..b"]),
        ("ipv4", ["255.1.0.9"], ["256.1.1.1", "1.1.1"]),
        ("ipv6", ["::", "1::8", "1:2:3:4:5:6:7:8", "fe80::1"], ["1:2", ":::", "1::2::3"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ("uri", ["https://a.b/c?d=e#f", "urn:a:b"], ["/a", "a b", "https://a b"]),
        ("uri-reference", ["/a/b", "#c", "https://a.b"], ["a b"]),
        ("json-pointer", ["", "/a/~0b"], ["a", "/~2"]),
    ],
)
def test_string_formats_are_enforced(name: str, valid: list[str], invalid: list[str]) -> None:
    schema = {"type": "string", "format": name}
    assert [accepts(schema, json.dumps(text)) for text in valid] == [True] * len(valid)
    assert [accepts(schema, json.dumps(text)) for text in invalid] == [False] * len(invalid)


@pytest.mark.parametrize("name", ["regex", "idn-hostname", "uri-template", "unknown", "made-up"])
def test_unsupported_string_formats_are_refused(name: str) -> None:
    assert refusal(STRING | {"format": name}).startswith(
        f'schema: format "{name}" is not supported; of: date, '
    )


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (False, "schema: no finite JSON value matches"),
        ({"allOf": [True, False]}, "schema: no finite JSON value matches"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
         "schema: no finite JSON value matches"),
        ({"$ref": "#"}, "schema: a '$ref' leads back to itself"),
        ({"enum": []}, "schema.enum: it admits no value"),
        ({"const": "\0"}, "schema.const: it admits no value that can be written"),
        ({"type": "string", "const": 1}, "schema: no JSON value matches both its type"),
        ({"type": "text"}, "schema: 'type' must be of array, "),
        ({"multipleOf": 0.1}, "schema: keyword 'multipleOf' is only supported with whole"),
        ({"minimum": 2**60}, "schema.minimum: numbers are only supported between"),
        ({"const": 0.30000000000000004}, "schema.const: numbers are only supported with up to"),
        ({"minLength": -1}, "schema: 'minLength' must be a whole number"),
        ({"pattern": "(?=a)"}, "schema: the pattern cannot be honoured: lookaround"),
        ({"$ref": "other.json"}, "schema: keyword '$ref' is only supported with a place in"),
        ({"$ref": "#name"}, "schema: '$ref' points at nothing: #name"),
        ({"$ref": "#/$defs/a"}, "schema: '$ref' points at nothing: #/$defs/a"),
        ({"items": {"$id": "http://a.b/c"}}, "schema.items: keyword '$id' is only supported at"),
        ({"$schema": "http://a.b/c"}, "schema: '$schema' must name draft 4, 6, 7, 2019-09"),
        ({"items": [STRING]}, "schema: 'items' in this form is not in draft 2020-12; use prefix"),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, "schema: keyword 'minProp"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "schema: keyword 'maxProp"),
        ({"minProperties": 2}, "schema: keyword 'minProperties' is not supported here"),
        ({"properties": {"a": {}}, "patternProperties": {"^a$": {}}},
         "schema.patternProperties: keyword 'patternProperties' is not supported with a pattern"),
        ({"oneOf": [{"pattern": "a"}, STRING]}, "schema: keyword 'oneOf' is not supported"),
        ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, "schema: no finite JSON value"),
        ({"not": {"$ref": "#"}}, "schema: a '$ref' leads back to itself"),
        ({"$defs": {"a": {"$anchor": "x"}, "b": {"$anchor": "x"}}, "$ref": "#x"},
         "schema: '$ref' points at several schemas: #x"),
        ({"items": {"not": {"pattern": "a"}}}, "schema.items.not: keyword 'pattern' is not"),
        ({"if": {"multipleOf": 2}, "then": STRING}, "schema.if: keyword 'multipleOf' is not"),
        ({"$schema": DRAFT4, "not": {"const": 1}}, "schema.not: keyword 'const' is not in the d"),
        ({"not": {"const": "x" * 5000}}, "schema.not.const: its strings are too long"),
        ({"contains": {}, "minContains": 17}, "schema: keyword 'minContains' is only supported"),
        ({"propertyNames": {"anyOf": [STRING]}}, "schema.propertyNames: keyword 'anyOf' is not"),
        ({"propertyNames": {"pattern": "^a", "maxLength": 3}},
         "schema.propertyNames: keyword 'propertyNames' is only supported with one pattern"),
        ({"properties": {"a": {}}, "propertyNames": {"pattern": "^[a-z]$"}},
         "schema.propertyNames: keyword 'propertyNames' is not supported with a pattern that"),
        ({"dependentRequired": {f"a{n}": ["b"] for n in range(10)}},
         "schema: the conditions on one value have over 512 combinations"),
        ({"uniqueItems": 2}, "schema: 'uniqueItems' must be true or false"),
        ({"dependentRequired": {"a": "b"}}, "schema.dependentRequired.a: 'required' must be"),
        ({"properties": [1]}, "schema: 'properties' must be an object of schemas"),
        ({"items": 3}, "schema.items: a schema must be an object or a boolean"),
        ({"const": "\ud800"}, "schema: the schema has half of a surrogate pair"),
    ],
)  # fmt: skip
def test_unsatisfiable_or_unsupported_schemas_are_refused(schema: Any, problem: str) -> None:
    assert refusal(schema).startswith(problem)


def test_one_of_branches_with_a_required_constant_are_supported() -> None:
    """What pydantic writes for a discriminated union."""
    schema = {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            name: {
                "type": "object",
                "properties": {"kind": {"const": name, "type": "string"}},
                "required": ["kind"],
            }
            for name in ("cat", "dog")
        },
    }
    assert accepts(schema, '{"kind": "dog"}')
    assert not accepts(schema, '{"kind": "cow"}')


def test_an_optional_property_without_a_finite_value_is_left_out() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/endless"}, "b": STRING},
        "additionalProperties": False,
        "$defs": {
            "endless": {
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/endless"}},
                "required": ["next"],
            }
        },
    }
    assert accepts(schema, '{"b": ""}')
    assert not accepts(schema, '{"a": {"next": {}}}')


def test_a_property_name_cannot_be_spelled_with_escapes() -> None:
    """Else another spelling of the name would be an additional property, with other rules."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": STRING,
    }
    assert accepts(schema, '{"a": 1, "b": "x"}')
    assert not accepts(schema, r'{"a": 1, "\u0061": "x"}')


def test_older_json_schema_drafts_are_supported() -> None:
    assert not accepts({"$schema": DRAFT4, "minimum": 1, "exclusiveMinimum": True}, "1")
    tuple_schema = {"$schema": DRAFT7, "items": [STRING], "additionalItems": {"type": "null"}}
    assert accepts(tuple_schema, '["a", null]')
    assert not accepts(tuple_schema, '["a", "b"]')
    assert refusal({"$schema": DRAFT4, "exclusiveMinimum": 1}).startswith(
        "schema: 'exclusiveMinimum' is a boolean in draft 4"
    )


@pytest.mark.parametrize("text", ['{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}'])
def test_json_output_may_have_one_space_after_separators(text: str) -> None:
    assert accepts({"type": "object"}, text)


@pytest.mark.parametrize("text", ['{ "a": 1}', '{"a":  1}', '{"a": 1 }', '{"a":\n1}', "{\n}"])
def test_json_output_has_no_other_whitespace(text: str) -> None:
    assert not accepts({"type": "object"}, text)
