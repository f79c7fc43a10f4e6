"""Finds personal data in text, also in text that arrives in pieces.

Each kind of data has a regular expression whose matches have a limited length, and a check of the
match. Whether a match starts at a position depends only on the characters just before it and a
limited number of characters after it. So streamed text gives the same result as the whole text, if
text at the end that may start a match is held back. Only Latin letters count as part of a word. So
an address is also found if text in another script touches it.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Country code -> IBAN length.
_IBAN_LENGTHS = {
    length: frozenset(countries.split())
    for length, countries in {
        15: "NO",
        16: "BE",
        18: "DK FI FK FO GL NL SD",
        19: "MK SI",
        20: "AT BA EE KZ LT LU MN XK",
        21: "CH CR HR LI LV",
        22: "BG BH DE GB GE IE ME RS VA",
        23: "AE GI IL IQ OM SO TL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST",
        26: "IS TR",
        27: "BI DJ FR GR IT MC MR SM",
        28: "AL AZ BY CY DO GT HU LB NI PL SV",
        29: "BR EG PS QA UA",
        30: "JO KW MU YE",
        31: "MT SC",
        32: "LC",
        33: "RU",
    }.items()
}
_LENGTH_OF = {country: length for length, group in _IBAN_LENGTHS.items() for country in group}

_WORD = r"A-Za-z0-9À-ÖØ-öø-ɏ"
_START = rf"(?<![{_WORD}])"
_END = rf"(?![{_WORD}])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"


@dataclass(frozen=True, slots=True)
class PiiKind:
    """A kind of personal data. `length_of` takes a match of the pattern and returns how many of its
    characters are personal data. 0 means that the check failed.
    """

    name: str
    pattern: re.Pattern[str]
    hint: str  # a character that any match contains, or all digits; for a quick pre-check
    length_of: Callable[[str], int]

    @property
    def label(self) -> str:
        return f"[{self.name.upper()}]"


@dataclass(frozen=True, slots=True)
class PiiMatch:
    start: int
    end: int
    label: str


def _all_of(text: str) -> int:
    return len(text)


def _card(text: str) -> int:
    """Length of the longest prefix that ends with a group of digits and has a valid check digit."""
    longest = count = 0
    # Two running Luhn sums. sums[0] doubles digits at even positions, sums[1] at odd positions.
    sums = [0, 0]
    for end, character in enumerate(text, start=1):
        if character in " -":
            continue
        digit = ord(character) - 48
        doubled = 2 * digit - 9 if digit > 4 else 2 * digit
        sums[count % 2] += doubled
        sums[1 - count % 2] += digit
        count += 1
        ends_group = end == len(text) or text[end] in " -"
        if count >= 13 and ends_group and sums[count % 2] % 10 == 0:
            longest = end
    return longest if len({*text} - {" ", "-"}) > 1 else 0


def _iban(text: str) -> int:
    length = _LENGTH_OF.get(text[:2].upper(), 0)
    end = characters = 0
    while end < len(text) and characters < length:
        characters += text[end] != " "
        end += 1
    if characters < length or not length or (end < len(text) and text[end] != " "):
        return 0
    plain = text[:end].replace(" ", "").upper()
    number = "".join(str(int(each, 36)) for each in plain[4:] + plain[:4])
    return end if int(number) % 97 == 1 else 0


def _ipv6(text: str) -> int:
    end = len(text.rstrip(".:")) or len(text)
    for candidate in (text, text[:end]):
        try:
            ipaddress.IPv6Address(candidate)
        except ValueError:
            continue
        return len(candidate)
    return 0


def _phone(text: str) -> int:
    num_digits = sum(each.isdigit() for each in text)
    if _DATE.fullmatch(text) or not (7 if text.startswith("+") else 8) <= num_digits <= 15:
        return 0
    return len(text)


_DATE = re.compile(r"[0-9]{1,2}[./ -][0-9]{1,2}[./ -][0-9]{2,4}")
_DIGITS = "0123456789"

KINDS = {
    kind.name: kind
    for kind in (
        PiiKind(
            "email",
            re.compile(
                rf"{_START}[{_WORD}][{_WORD}._%+'-]{{0,63}}@(?:[{_WORD}-]{{1,63}}\.){{1,4}}"
                rf"[A-Za-z]{{2,24}}{_END}"
            ),
            "@",
            _all_of,
        ),
        PiiKind(
            "iban",
            re.compile(rf"{_START}[A-Za-z]{{2}}[0-9]{{2}}(?: ?[A-Za-z0-9]){{11,29}}{_END}"),
            _DIGITS,
            _iban,
        ),
        PiiKind(
            "credit_card",
            re.compile(rf"{_START}[2-6][0-9]{{3}}(?:[ -]?[0-9]){{9,15}}{_END}"),
            _DIGITS,
            _card,
        ),
        PiiKind(
            "ssn",
            re.compile(
                rf"(?<![{_WORD}-])(?!000|666|9)[0-9]{{3}}([- ])(?!00)[0-9]{{2}}\1(?!0000)"
                rf"[0-9]{{4}}{_END}"
            ),
            _DIGITS,
            _all_of,
        ),
        PiiKind(
            "ipv4",
            re.compile(rf"(?<![{_WORD}.]){_BYTE}(?:\.{_BYTE}){{3}}(?![{_WORD}]|\.[0-9])"),
            ".",
            _all_of,
        ),
        PiiKind(
            "ipv6",
            re.compile(
                rf"(?<![{_WORD}:.])(?=[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:)[0-9A-Fa-f:.]{{2,45}}+{_END}"
            ),
            ":",
            _ipv6,
        ),
        PiiKind(
            "phone",
            re.compile(
                rf"(?<![{_WORD}+(])(?:"
                r"\+[1-9](?:[ ./()-]{0,2}[0-9]){6,14}"  # international, with a leading plus sign
                # North American
                r"|(?:1[ .-])?(?:\([0-9]{3}\) ?|[0-9]{3}[ .-])[0-9]{3}[ .-][0-9]{4}"
                r"|\(?0[0-9]{1,4}\)?(?:[ ./-][0-9]{2,8}){1,4}"  # national, with a leading zero
                rf"){_END}"
            ),
            _DIGITS,
            _phone,
        ),
    )
}

# Max number of characters at the end of a text that are held back because they may start a match.
# Each is one more than the longest match with its look-ahead.
_WORD_REACH, _NUMBER_REACH, _IBAN_REACH = 340, 72, 72
_REVERSED_WORD = re.compile(rf"[{_WORD}._%+'@:-]*+")
_REVERSED_NUMBER = re.compile(r"[0-9 ./()+-]*+")
_NUMBER_START = re.compile(r"[0-9+(]")
_OPEN_IBAN = re.compile(rf"{_START}[A-Za-z]{{2}}[0-9]{{2}}(?: ?[A-Za-z0-9])*+ ?\Z")


def find(text: str, position: int, kinds: list[PiiKind]) -> Iterator[PiiMatch]:
    """All matches from `position` on, in order and without overlaps. If two kinds match at the same
    position, the first in `kinds` is used.
    """
    nearest = {kind.name: _next(kind, text, position) for kind in kinds if _hinted(kind, text)}
    while True:
        for kind in kinds:
            found = nearest.get(kind.name)
            if found is not None and found.start < position:
                nearest[kind.name] = _next(kind, text, position)
        here = [found for found in nearest.values() if found is not None]
        if not here:
            return
        first = min(here, key=lambda found: found.start)
        yield first
        position = first.end


def _hinted(kind: PiiKind, text: str) -> bool:
    if len(kind.hint) == 1:
        return kind.hint in text
    return not text.isalpha()


def _next(kind: PiiKind, text: str, position: int) -> PiiMatch | None:
    while match := kind.pattern.search(text, position):
        length = kind.length_of(match[0])
        if length:
            return PiiMatch(match.start(), match.start() + length, kind.label)
        position = match.start() + 1
    return None


def open_end(text: str) -> int:
    """Position from which the text must be held back, because further text could make it a
    match.
    """
    tail = text[-_WORD_REACH:]
    backwards = tail[::-1]
    word = _REVERSED_WORD.match(backwards)
    number = _REVERSED_NUMBER.match(backwards[:_NUMBER_REACH])
    assert word is not None and number is not None
    held = word.end()
    digits = tail[len(tail) - number.end() :]
    first = _NUMBER_START.search(digits)
    if first is not None:
        held = max(held, len(digits) - first.start())
    iban = _OPEN_IBAN.search(tail[-_IBAN_REACH:])
    if iban is not None:
        held = max(held, len(iban[0]))
    return len(text) - held
