"""Fields of request bodies that accept several forms, such as a string or a list. Each field has a
parser, and a JSON schema of the accepted values.

The parsers stop at the first mistake. Their errors quote at most a few characters of the value.
"""

import math
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    WithJsonSchema,
)

from engine.core.interfaces import sampling_fields
from engine.core.interfaces.backend import GrammarSpec
from engine.core.interfaces.request import SAMPLER_TABLE, SAMPLERS
from engine.servers.http.errors import describe, problem
from engine.servers.schema.messages import MAX_MESSAGES, ROLES, parse_messages
from engine.servers.schema.structured import (
    MAX_CHOICES,
    ResponseFormat,
    guided_parser,
    parse_structured_outputs,
    read_response_format,
)
from engine.servers.schema.tools import MAX_TOOLS, parse_tools

MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_IDS = 64
MAX_BIASES = 1_024
MAX_NAMED = 8  # mistakes that an error lists
MAX_ALLOWED_IDS = 2**18
MAX_BAD_WORDS = 128
MAX_BREAKERS = 16
MAX_STOP_REGEXES = 8
MAX_SAMPLERS = 16
MAX_PROMPTS = 128
IDS_AT_ONCE = 8192
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKENS = sampling_fields.MAX_TOKENS
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_TEMPLATE_OPTIONS = 32

Prompt = str | tuple[int, ...]


def _off_if_negative(value: Any) -> Any:
    """Replace `top_k` -1 by 0. Both mean "off": vLLM uses -1, other servers use 0."""
    return 0 if type(value) is int and value == -1 else value


class NoLimit(int):
    """A length limit that bodies can't have. Parameters of other servers are converted to it."""


NO_LIMIT = NoLimit(-1)


def _parse_stop(value: Any) -> tuple[str, ...] | None:
    """None if nothing is said. An empty text or list says that there are none."""
    if value is None:
        return None
    if value == "":
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise problem("stop", f"should be a string or a list of strings, got {describe(value)}")
    if len(stops) > MAX_STOPS:
        raise problem("stop", f"should have at most {MAX_STOPS} strings, got {len(stops)}")
    for position, stop in enumerate(stops):
        if not isinstance(stop, str) or len(stop) > MAX_STOP_LENGTH:
            raise problem(
                f"stop[{position}]",
                f"should be a string of at most {MAX_STOP_LENGTH} characters, got {describe(stop)}",
            )
    return tuple(stop for stop in stops if stop)


def _parse_samplers(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = [_SAMPLER_LETTERS.get(each, each) for each in value[: MAX_SAMPLERS + 1]]
    names = ", ".join(SAMPLERS)
    if not isinstance(value, list) or len(value) > MAX_SAMPLERS:
        rule = f"should be a list of at most {MAX_SAMPLERS} of these names: {names}"
        raise problem("samplers", f"{rule}; got {describe(value)}")
    found = [_SAMPLER_ALIASES.get(each, each) if isinstance(each, str) else each for each in value]
    for position, name in enumerate(found):
        if name not in SAMPLERS or name in found[:position]:
            rule = f"should be one of {names}, and each only once"
            raise problem(f"samplers[{position}]", f"{rule}; got {describe(value[position])}")
    is_late = [name not in ("penalties", "dry") for name in found]
    if is_late != sorted(is_late):
        raise problem("samplers", "should have penalties and dry before all others")
    return tuple(found)


def parse_bias(value: Any) -> dict[int | str, float]:
    """Biases of token ids and of texts. Only llama.cpp's form, a list of pairs, has texts. In an
    object, a key that is no number is a mistake of the client.
    """
    if value is None:
        return {}
    is_list = isinstance(value, list) and all(isinstance(e, list) and len(e) == 2 for e in value)
    if not (is_list or isinstance(value, dict)):
        rule = "should be an object or a list of pairs"
        raise problem("logit_bias", f"{rule}, got {describe(value)}")
    if len(value) > MAX_BIASES:
        raise problem("logit_bias", f"should have at most {MAX_BIASES} keys, got {len(value)}")
    biases: dict[int | str, float] = {}
    wrong = [describe(key) for key in ([] if is_list else value) if not _is_number(key)]
    if wrong:
        named = ", ".join(wrong[:MAX_NAMED])
        rule = f"keys should be token ids, got {named}; send a list of pairs for texts"
        raise problem("logit_bias", rule)
    for key, bias in value if is_list else value.items():
        key = key if is_list else int(key)
        is_text = isinstance(key, str) and 1 <= len(key) <= MAX_STOP_LENGTH
        if not (is_text or (type(key) is int and 0 <= key <= MAX_TOKEN_ID)):
            raise problem("logit_bias", f"keys should be token ids or texts, got {describe(key)}")
        if bias is False and is_list:
            bias = -math.inf
        elif type(bias) not in (int, float) or not -100 <= bias <= 100:
            rule = f"should be from -100 to 100, got {describe(bias)}"
            raise problem(f"logit_bias.{str(key)[:64]}", rule)
        biases[key] = float(bias)
    return biases


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 10


def _parse_metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise problem("metadata", f"should be an object of at most {MAX_METADATA} keys")
    for key, text in value.items():
        if not 1 <= len(key) <= MAX_METADATA_KEY:
            raise problem("metadata", f"keys should have 1 to {MAX_METADATA_KEY} characters")
        if not isinstance(text, str) or len(text) > MAX_METADATA_VALUE:
            rule = f"should be a string of at most {MAX_METADATA_VALUE} characters"
            raise problem(f"metadata.{key}", f"{rule}, got {describe(text)}")
    return value


def _parse_template_options(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_OPTIONS:
        rule = f"should be an object of at most {MAX_TEMPLATE_OPTIONS} keys"
        raise problem("chat_template_kwargs", f"{rule}, got {describe(value)}")
    return value


def _parse_truncation(value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not (value == -1 or 1 <= value <= MAX_TOKENS):
        rule = f"should be from 1 to {MAX_TOKENS}, or -1 for what fits"
        raise problem("truncate_prompt_tokens", f"{rule}, got {describe(value)}")
    return value


def _is_token_list(value: Any) -> bool:
    """Whether `value` is a list of token ids. A long list is checked in parts. In one call, the
    check would hold the GIL and block the event loop for too long.
    """
    return isinstance(value, list) and all(
        _are_token_ids(value[start : start + IDS_AT_ONCE])
        for start in range(0, len(value), IDS_AT_ONCE)
    )


def _are_token_ids(values: list[Any]) -> bool:
    return not set(map(type, values)) - {int} and 0 <= min(values) <= max(values) <= MAX_TOKEN_ID


def parse_prompts(value: Any, where: str = "prompt") -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    shape = f"should be text, token ids, or a list of 1 to {MAX_PROMPTS} of either"
    if not isinstance(value, list) or not value:
        raise problem(where, f"{shape}; got {describe(value)}")
    if type(value[0]) is int:
        if not _is_token_list(value):
            raise problem(where, f"token ids should be integers from 0 to {MAX_TOKEN_ID}")
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise problem(where, f"{shape}; got {len(value)}")
    prompts: list[Prompt] = []
    for position, item in enumerate(value):
        if isinstance(item, str):
            prompts.append(item)
        elif item and _is_token_list(item):
            prompts.append(tuple(item))
        else:
            raise problem(
                f"{where}[{position}]", f"should be text or token ids; got {describe(item)}"
            )
    return tuple(prompts)


def _parse_one_prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if value and _is_token_list(value):
        return tuple(value)
    raise problem("prompt", f"should be text or a list of token ids; got {describe(value)}")


def _parsed(parse: Any, schema: dict[str, Any]) -> tuple[PlainValidator, WithJsonSchema]:
    return PlainValidator(parse), WithJsonSchema(schema)


def _or_null(*schemas: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*schemas, {"type": "null"}]}


_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}
_TOKEN_IDS = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID},
}
_STOP_TEXT = _TEXT | {"maxLength": MAX_STOP_LENGTH}
_BIAS_SCHEMA = {
    "type": "object",
    "maxProperties": MAX_BIASES,
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_BIAS_PAIRS_SCHEMA = {
    "type": "array",
    "maxItems": MAX_BIASES,
    "items": {"type": "array", "minItems": 2, "maxItems": 2},
}
_METADATA_SCHEMA = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"minLength": 1, "maxLength": MAX_METADATA_KEY},
    "additionalProperties": _TEXT | {"maxLength": MAX_METADATA_VALUE},
}
_MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": _or_null(_TEXT, {"type": "array", "items": _OBJECT}),
            "name": _TEXT,
            "tool_calls": {"type": "array", "items": _OBJECT},
            "tool_call_id": _TEXT,
            "reasoning_content": _or_null(_TEXT),
        },
    },
}
_FORMAT_SCHEMA = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": _OBJECT,
        "schema": _OBJECT,
    },
}
_CHOICES_SCHEMA = {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": _TEXT}
_TRUNCATION_SCHEMA = {"type": "integer", "minimum": -1, "maximum": MAX_TOKENS, "not": {"const": 0}}
_TOOLS_SCHEMA = {"type": "array", "maxItems": MAX_TOOLS, "items": _OBJECT}

_SAMPLER_LETTERS = {each.letter: name for name, each in SAMPLER_TABLE.items()}
# llama.cpp's other names of samplers.
_SAMPLER_ALIASES = {"typ_p": "typical_p", "typ": "typical_p", "temp": "temperature"}

Fraction = sampling_fields.Fraction
TokenCount = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
Priority = Annotated[int, Field(ge=-100, le=100)]  # requests with lower numbers run first
EndUser = Annotated[str, Field(max_length=512)]
TopK = Annotated[
    int,
    Field(ge=0, le=MAX_TOKENS),
    BeforeValidator(_off_if_negative),
    WithJsonSchema({"type": "integer", "minimum": -1, "maximum": MAX_TOKENS}),
]

LogitBias = Annotated[
    dict[int | str, float],
    *_parsed(parse_bias, _or_null(_BIAS_SCHEMA, _BIAS_PAIRS_SCHEMA)),
]
StopStrings = Annotated[
    tuple[str, ...] | None,
    *_parsed(
        _parse_stop,
        _or_null(_STOP_TEXT, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP_TEXT}),
    ),
]
Samplers = Annotated[
    tuple[str, ...],
    *_parsed(
        _parse_samplers,
        _or_null(
            {"type": "array", "maxItems": MAX_SAMPLERS, "items": {"enum": list(SAMPLERS)}},
            _TEXT | {"maxLength": MAX_SAMPLERS},
        ),
    ),
]
BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
    Field(max_length=MAX_BAD_WORDS),
]
Breakers = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=MAX_BREAKERS)
]
StopRegexes = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1024)]],
    Field(max_length=MAX_STOP_REGEXES),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
AllowedIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS)]
Metadata = Annotated[dict[str, str], *_parsed(_parse_metadata, _or_null(_METADATA_SCHEMA))]
Truncation = Annotated[int | None, *_parsed(_parse_truncation, _or_null(_TRUNCATION_SCHEMA))]
TemplateOptions = Annotated[dict[str, Any], *_parsed(_parse_template_options, _or_null(_OBJECT))]
Prompts = Annotated[
    tuple[Prompt, ...],
    *_parsed(
        parse_prompts,
        {
            "anyOf": [
                _TEXT,
                _TOKEN_IDS,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                    "items": {"anyOf": [_TEXT, _TOKEN_IDS]},
                },
            ]
        },
    ),
]
OnePrompt = Annotated[Prompt, *_parsed(_parse_one_prompt, {"anyOf": [_TEXT, _TOKEN_IDS]})]
Messages = Annotated[tuple[dict[str, Any], ...], *_parsed(parse_messages, _MESSAGES_SCHEMA)]
Tools = Annotated[tuple[dict[str, Any], ...], *_parsed(parse_tools, _or_null(_TOOLS_SCHEMA))]
# The choice of a tool as the client sent it. It is parsed later, when the tools are known.
RawToolChoice = Annotated[
    Any,
    WithJsonSchema(_or_null({"enum": ["none", "auto", "required"]}, _OBJECT)),
]
Format = Annotated[ResponseFormat | None, *_parsed(read_response_format, _or_null(_FORMAT_SCHEMA))]
StructuredOutputs = Annotated[
    GrammarSpec | None, *_parsed(parse_structured_outputs, _or_null(_OBJECT))
]
GuidedJson = Annotated[
    GrammarSpec | None,
    *_parsed(guided_parser("json"), _or_null(_TEXT, _OBJECT, {"type": "boolean"})),
]
GuidedRegex = Annotated[GrammarSpec | None, *_parsed(guided_parser("regex"), _or_null(_TEXT))]
GuidedChoice = Annotated[
    GrammarSpec | None, *_parsed(guided_parser("choice"), _or_null(_CHOICES_SCHEMA))
]
GuidedGrammar = Annotated[GrammarSpec | None, *_parsed(guided_parser("grammar"), _or_null(_TEXT))]
