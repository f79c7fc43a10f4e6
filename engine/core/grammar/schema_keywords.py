"""The keywords of JSON Schema that no grammar enforces: harmless ones, and refused ones.

What a refused keyword asks for would have to be checked on the finished answer; a client that sends
it is told so, with the path and another way to say it.
"""

# How the JSON is written: at most one space, and only where Python and most text on the web put it.
# Free whitespace lets small models fall into emitting it for ever, and no space at all is a form
# that they saw less often. Control characters are not escaped as \\uXXXX: with it a name could be
# spelled in several ways, and so escape the rules for its property.
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}

# Keywords that assert nothing.
ANNOTATIONS = frozenset(
    {"$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema"}
    | {"$vocabulary", "contentEncoding", "contentMediaType", "contentSchema", "default"}
    | {"definitions", "deprecated", "description", "discriminator", "example", "examples"}
    | {"externalDocs", "id", "readOnly", "title", "writeOnly", "xml"}
    # what editors and generators of forms read
    | {"allowTrailingCommas", "defaultSnippets", "deprecationMessage", "doNotSuggest"}
    | {"enumDescriptions", "enumNames", "errorMessage", "markdownDescription"}
    | {"markdownEnumDescriptions", "meta:enum", "propertyOrdering", "tsType"}
)
ANNOTATION_PREFIXES = ("x-", "x_", "_")
# Keywords that no grammar of ours enforces, with what to do instead.
REFUSED = {
    "not": "describe what is allowed",
    "if": "use anyOf with one branch for each case",
    "then": "use anyOf with one branch for each case",
    "else": "use anyOf with one branch for each case",
    "dependencies": "use anyOf with one branch for each case",
    "dependentRequired": "use anyOf with one branch for each case",
    "dependentSchemas": "use anyOf with one branch for each case",
    "propertyNames": "use patternProperties with additionalProperties: false",
    "uniqueItems": "leave it out and check the answer",
    "contains": "leave it out and check the answer",
    "minContains": "leave it out and check the answer",
    "maxContains": "leave it out and check the answer",
    "unevaluatedItems": "list the items with prefixItems and items",
    "unevaluatedProperties": "list all properties, and set additionalProperties: false there",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "extends": "use allOf",
    "disallow": "describe what is allowed",
    "divisibleBy": "use multipleOf",
    "nullable": 'use a list of types, as in "type": ["string", "null"]',
}
# The forms of refused keywords in which they assert nothing.
WITHOUT_EFFECT = {
    "uniqueItems": ("false",),
    "dependencies": ("{}",),
    "dependentRequired": ("{}",),
    "dependentSchemas": ("{}",),
    "propertyNames": ("true", "{}"),
    "unevaluatedItems": ("true", "{}"),
    "unevaluatedProperties": ("true", "{}"),
    "nullable": ("false",),
}
