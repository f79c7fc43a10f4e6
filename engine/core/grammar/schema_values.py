"""Checks numbers and other values in a schema, and converts them to values without rounding errors.

The grammar compares numbers with a bound digit by digit, but clients read numbers as doubles. So
only bounds are accepted for which doubles are exact. An exclusive bound becomes an inclusive bound
slightly inside the allowed range, so that rounding can't cross it.
"""

import json
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, NamedTuple

from engine.core.grammar.schema_drafts import Fail

MAX_MAGNITUDE = 2**53
MIN_MAGNITUDE = 1e-30
EXCLUSIVE_STEP = 1e-15  # the inclusive bound that replaces an exclusive bound of 0
# Max digits of a number that is not an integer. With more digits, llguidance may read the number as
# the neighbouring double.
MAX_DIGITS = 15
MAX_COUNT = 2**31 - 1
MAX_MULTIPLE = 1_000_000

# Characters that JSON can only write as \uXXXX, and DEL. The output grammars admit none of them.
_UNWRITABLE = frozenset(map(chr, (*range(8), 11, *range(14, 32), 127)))


def check_text(document: object, param: str, max_nesting: int, fail: Fail) -> None:
    """Refuse documents that can't be schemas: those with deep nesting, with NaN or infinity, or
    with lone surrogates.
    """
    pending: list[tuple[object, int]] = [(document, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > max_nesting:
            fail(param, f"the schema is nested deeper than {max_nesting}")
        if isinstance(value, dict):
            pending += [(part, depth + 1) for item in value.items() for part in item]
        elif isinstance(value, list):
            pending += [(part, depth + 1) for part in value]
        elif isinstance(value, float) and not math.isfinite(value):
            fail(param, "the schema has a number that is too large")
        elif isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            fail(param, "the schema has half of a surrogate pair, which is not Unicode")


def exact(value: Any, path: str, fail: Fail) -> Any:
    """Check a value of `const` or `enum`. Returns it with floats such as 2.0 converted to
    integers.
    """
    if isinstance(value, list):
        return [exact(item, path, fail) for item in value]
    if isinstance(value, dict):
        return {name: exact(item, path, fail) for name, item in value.items()}
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = _number(value, path, fail)
        if isinstance(number, float) and len(Decimal(repr(number)).as_tuple().digits) > MAX_DIGITS:
            fail(path, f"numbers are only supported with up to {MAX_DIGITS} digits")
        return number
    return value


def is_writable(value: Any) -> bool:
    """Whether the output grammars admit all strings in a value."""
    if isinstance(value, list):
        return all(is_writable(item) for item in value)
    if isinstance(value, dict):
        return all(is_writable(item) for item in value.values())
    return not isinstance(value, str) or _UNWRITABLE.isdisjoint(value)


def count(value: Any, path: str, keyword: str, fail: Fail) -> int:
    """Check the value of a keyword that is a count, such as `minItems`. Returns it as an
    integer.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        fail(path, f"'{keyword}' must be a whole number from 0 to {MAX_COUNT}")
    return value


def multiple(value: Any, path: str, fail: Fail) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_MULTIPLE:
        fail(
            path,
            f"keyword 'multipleOf' is only supported with whole numbers from 1 to {MAX_MULTIPLE}; "
            "readers round fractions differently",
        )
    return value


def bound(
    source: dict[str, Any],
    keyword: str,
    *,
    integers_only: bool,
    is_draft4: bool,
    path: str,
    fail: Fail,
) -> tuple[str, float] | None:
    """Convert one of the four bound keywords to an inclusive bound: `minimum` or `maximum`, and its
    number.

    Returns None if the keyword only modifies another one. In draft 4, `exclusiveMinimum` is a
    boolean that modifies `minimum`.
    """
    value = source[keyword]
    exclusive = keyword.startswith("exclusive")
    inclusive_keyword = keyword.removeprefix("exclusive").lower()
    if is_draft4:
        if exclusive:
            if not isinstance(value, bool):
                fail(path, f"'{keyword}' is a boolean in draft 4; name a newer one in \"$schema\"")
            return None
        exclusive = source.get(f"exclusive{keyword.capitalize()}") is True
    number = _number(value, f"{path}.{keyword}", fail)
    is_minimum = inclusive_keyword == "minimum"
    if integers_only and exclusive:
        return inclusive_keyword, math.floor(number) + 1 if is_minimum else math.ceil(number) - 1
    return inclusive_keyword, _inward(number, is_minimum, exclusive)


def _inward(number: float, is_minimum: bool, exclusive: bool) -> float:
    """The inclusive bound for `number`. If `number` is exclusive or has too many digits, this is
    the next number inside the allowed range that has `MAX_DIGITS` digits.
    """
    if not exclusive and isinstance(number, int):
        return number
    if number == 0:
        return EXCLUSIVE_STEP if is_minimum else -EXCLUSIVE_STEP
    digits = Context(MAX_DIGITS, ROUND_CEILING if is_minimum else ROUND_FLOOR)
    decimal = Decimal(repr(number))
    if not exclusive:
        return float(digits.plus(decimal))
    return float(digits.next_plus(decimal) if is_minimum else digits.next_minus(decimal))


def shorter_forms(keyword: str, number: float) -> list[float]:
    """The allowed numbers whose digits are a prefix of the bound's digits.

    llguidance's ranges omit these numbers: for a maximum of 0.95 it admits 0.90 and 0.8, but not
    0.9.
    """
    if isinstance(number, int) or (number > 0) != (keyword == "maximum"):
        return []
    whole, _, fraction = format(Decimal(repr(number)), "f").partition(".")
    shorter = [float(f"{whole}.{fraction[:end]}") for end in range(1, len(fraction))]
    return [each for each in dict.fromkeys(shorter) if not each.is_integer()]


def _number(value: Any, path: str, fail: Fail) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        fail(path, "it must be a number")
    if value == 0:
        return 0
    if not MIN_MAGNITUDE <= abs(value) <= MAX_MAGNITUDE:
        fail(path, "numbers are only supported between 1e-30 and 2**53, where they are exact")
    return int(value) if float(value).is_integer() else value


class DeclaredProperties(NamedTuple):
    num_declared: int
    num_required: int
    has_optional: bool
    is_closed: bool  # whether undeclared properties are forbidden


def declared_properties(source: dict[str, Any]) -> DeclaredProperties:
    properties, required = source.get("properties"), source.get("required")
    declared = set(properties) if isinstance(properties, dict) else set()
    needed = {name for name in required if isinstance(name, str)} if required else set()
    return DeclaredProperties(
        num_declared=len(declared),
        num_required=len(needed),
        has_optional=not declared <= needed,
        is_closed=source.get("additionalProperties") is False
        and not source.get("patternProperties"),
    )


def property_limit(source: dict[str, Any], keyword: str, count: int) -> tuple[bool, bool, str]:
    """Whether other keywords already imply `minProperties` or `maxProperties`, whether llguidance
    can enforce it, and advice for the case that it can't.
    """
    declared = declared_properties(source)
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
    return implied, enforced, advice


def work(keyword: str, value: Any) -> int:
    """How much work a keyword is, without the schemas in its value."""
    if keyword in ("const", "enum"):
        return 10 + len(json.dumps(value))
    return 10 + (len(value) if isinstance(value, str | list | dict) else 0)


# How the grammar lets the model write JSON. One space is allowed after "," and ":", where Python's
# `json.dumps` puts it. If any whitespace were allowed, small models might emit it forever. If none
# were allowed, the text would differ from most training data. Escapes of the form \uXXXX are not
# allowed. Otherwise a property name could be spelled in several ways and evade the rules for this
# property.
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}

# Schema keywords that don't constrain values. They are ignored.
ANNOTATIONS = frozenset(
    {"$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema"}
    | {"$vocabulary", "contentEncoding", "contentMediaType", "contentSchema", "default"}
    | {"definitions", "deprecated", "description", "discriminator", "example", "examples"}
    | {"externalDocs", "id", "readOnly", "title", "writeOnly", "xml"}
    # keywords for editors and form generators
    | {"allowTrailingCommas", "defaultSnippets", "deprecationMessage", "doNotSuggest"}
    | {"enumDescriptions", "enumNames", "errorMessage", "markdownDescription"}
    | {"markdownEnumDescriptions", "meta:enum", "propertyOrdering", "tsType"}
)
ANNOTATION_PREFIXES = ("x-", "x_", "_")


def is_annotation(keyword: str) -> bool:
    return keyword in ANNOTATIONS or keyword.startswith(ANNOTATION_PREFIXES)


# Schema keywords that we can't enforce -> advice for the client.
REFUSED = {
    "extends": "use allOf",
    "disallow": "use not",
    "divisibleBy": "use multipleOf",
    "nullable": 'use a list of types, as in "type": ["string", "null"]',
}
# Keyword in `REFUSED` -> its values, as JSON, that don't constrain anything. With these values the
# keyword is accepted.
WITHOUT_EFFECT = {"nullable": ("false",)}


_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# A host name has at most 253 characters. Four labels of up to 63 characters and three dots can have
# 255, so this pattern nearly keeps the limit.
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"

_HEX4 = "[0-9A-Fa-f]{1,4}"


def _ipv6() -> str:
    whole = f"{_HEX4}(?::{_HEX4}){{7}}"
    shortened = []
    for before in range(8):  # groups to the left of '::', which stands for one or more groups
        left = f"{_HEX4}(?::{_HEX4}){{{before - 1}}}" if before else ""
        after = 7 - before
        right = f"(?:{_HEX4}(?::{_HEX4}){{0,{after - 1}}})?" if after else ""
        shortened.append(f"{left}::{right}")
    return "|".join([whole, *shortened])


def _date() -> str:
    two_digits = "(?:0[1-9]|[1-9][0-9])"
    leap_ending = "(?:0[48]|[2468][048]|[13579][26])"
    any_year = f"(?:[0-9]{{2}}{two_digits}|{two_digits}00)"
    leap_year = f"(?:[0-9]{{2}}{leap_ending}|{leap_ending}00)"
    common = (
        "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
        "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
        "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    )
    return f"(?:{any_year}-{common}|{leap_year}-02-29)"


_HOURS_MINUTES = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS_MINUTES}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOURS_MINUTES})"

_NUMBER = "[0-9]{1,9}"
_CLOCK = f"(?:{_NUMBER}H(?:{_NUMBER}M(?:{_NUMBER}S)?)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"
_CALENDAR = f"(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"
_DURATION = f"P(?:{_CALENDAR}(?:T{_CLOCK})?|T{_CLOCK}|{_NUMBER}W)"

_MAIL_NAME = "[A-Za-z0-9_+-]+"
_EMAIL = rf"{_MAIL_NAME}(?:\.{_MAIL_NAME})*@{_HOST}"

_PATH_CHAR = r"(?:[A-Za-z0-9_.~!$&'()*+,;=:@\-]|%[0-9A-Fa-f]{2})"
_PATH = f"(?:/{_PATH_CHAR}*)*"
_TAIL = rf"(?:\?(?:{_PATH_CHAR}|[/?])*)?(?:\x23(?:{_PATH_CHAR}|[/?])*)?"
_AUTHORITY = f"(?:{_MAIL_NAME}@)?(?:{_HOST}|{_IPV4})(?::[0-9]{{1,5}})?"
_URI = (
    r"[A-Za-z][A-Za-z0-9+.\-]*:"
    f"(?://{_AUTHORITY}{_PATH}|{_PATH_CHAR}+{_PATH}){_TAIL}"
)
_FIRST_SEGMENT = r"(?:[A-Za-z0-9_.~!$&'()*+,;=@\-]|%[0-9A-Fa-f]{2})+"
_RELATIVE = f"(?:/(?:{_PATH_CHAR}+{_PATH})?|{_FIRST_SEGMENT}{_PATH}|){_TAIL}"

STRING_FORMATS = {
    "date": _date(),
    "time": _TIME,
    "date-time": f"{_date()}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "iri": _URI,
    "uri-reference": f"{_URI}|{_RELATIVE}",
    "iri-reference": f"{_URI}|{_RELATIVE}",
    "json-pointer": "(?:/(?:[A-Za-z0-9_. -]|~[01])*)*",
}
# Values of `format` that only say how a value is shown or stored. They don't constrain values.
FREE_FORMATS = frozenset({"password", "float", "double"})
# Value of `format` for integers -> smallest and largest value. Bounds are at most 2**53, because
# most JSON readers round larger integers.
INTEGER_FORMATS = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**53), 2**53),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**53),
}
