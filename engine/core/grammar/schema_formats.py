"""Supported formats of JSON strings and numbers, as rules that a grammar can enforce.

Each expression only admits text that strict validators accept, but not always all of it: dates
exist (leap years included), seconds end at 59, addresses have no exotic parts. Expressions are in
the automaton's syntax, not for `translate`.
"""

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"  # four labels stay below the length limit

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
# These describe how a value is shown or stored; every value of the type is valid.
FREE_FORMATS = frozenset({"password", "float", "double"})
# Up to 2**53, where integers stop being exact in most JSON readers.
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
