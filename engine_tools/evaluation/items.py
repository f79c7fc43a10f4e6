"""Reads a file of questions. A line is a JSON object: what is asked, and how the answer is checked.

What is asked is `question` (a user message; `prompt` is another name for it) or `messages`. The
check follows from the other fields: `choices` are compared by log-probability, `schema` checks a
JSON value, `criteria` are for a judge, and otherwise `answer` is compared with the text.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.core.errors import InvalidRequestError
from engine_tools.evaluation.texts import predicted_number

Comparison = Literal["exact", "contains", "number"]
COMPARISONS: tuple[Comparison, ...] = ("exact", "contains", "number")
ROLES = ("system", "user", "assistant")
_ASKED = ("question", "prompt", "messages")
_FIELDS = {"id", *_ASKED, "answer", "check", "choices", "schema", "criteria"}


@dataclass(frozen=True, slots=True)
class TextCheck:
    """The answer is one of these texts, contains one, or comes to the number."""

    how: Comparison
    accepted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChoiceCheck:
    """Of these continuations, the one at `right` has the highest log-probability."""

    choices: tuple[str, ...]
    right: int


@dataclass(frozen=True, slots=True)
class SchemaCheck:
    """The answer is JSON that satisfies `schema`. With `has_value`, it also equals `value`."""

    schema: Any
    has_value: bool = False
    value: Any = None


@dataclass(frozen=True, slots=True)
class JudgeCheck:
    """Another model decides whether the answer satisfies `criteria` and agrees with `reference`."""

    criteria: str
    reference: str


Check = TextCheck | ChoiceCheck | SchemaCheck | JudgeCheck


@dataclass(frozen=True, slots=True)
class Item:
    id: str
    messages: tuple[dict[str, str], ...]
    check: Check
    digest: str  # of the line, by which a resumed run finds its result

    @property
    def question(self) -> str:
        """The text of all messages, for prompts without a chat template."""
        return "\n\n".join(each["content"] for each in self.messages)


def expected(check: Check) -> str:
    """What a right answer would be, for people."""
    match check:
        case TextCheck():
            return " or ".join(check.accepted)
        case ChoiceCheck():
            return check.choices[check.right]
        case SchemaCheck():
            return json.dumps(check.value if check.has_value else check.schema, ensure_ascii=False)
        case JudgeCheck():
            return check.reference or check.criteria


def read_items(path: Path, default_check: Comparison | None = None) -> list[Item]:
    """Read all lines. `default_check` is for lines that name no check. If a line is invalid, raises
    `InvalidRequestError` with its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequestError(f"{path} can't be read: {error.strerror}", param="file") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8: {error.reason}", param="file") from None
    items: list[Item] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            items.append(_item(str(number), line, default_check))
        except ValueError as error:
            reason = f"{path}, line {number}: {error}"
            raise InvalidRequestError(reason, param="file") from None
    if not items:
        raise InvalidRequestError(f"{path} has no questions", param="file")
    return items


def _item(number: str, line: str, default_check: Comparison | None) -> Item:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(value, dict):
        raise ValueError("a line is an object with question and answer")
    if unknown := sorted(value.keys() - _FIELDS):
        raise ValueError(f"unknown field '{unknown[0]}'; there are {', '.join(sorted(_FIELDS))}")
    check = _check(value, default_check)
    digest = hashlib.sha256(json.dumps([value, repr(check)], sort_keys=True).encode()).hexdigest()
    return Item(str(value.get("id", number)), _messages(value), check, digest[:16])


def _messages(value: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    if sum(name in value for name in _ASKED) != 1:
        raise ValueError(f"give one of {', '.join(_ASKED)}")
    if "messages" not in value:
        text = value.get("question", value.get("prompt"))
        if not isinstance(text, str) or not text:
            raise ValueError("question must be a text")
        return ({"role": "user", "content": text},)
    messages = value["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f"messages are a list of a role ({', '.join(ROLES)}) and a content each")
    if messages[-1]["role"] != "user":
        raise ValueError("the last of messages must be of the user")
    return tuple(messages)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and value["role"] in ROLES
        and isinstance(value["content"], str)
    )


def _check(value: Mapping[str, Any], default_check: Comparison | None) -> Check:
    kinds: dict[str, Callable[[Mapping[str, Any]], Check]] = {
        "choices": _choice_check,
        "schema": _schema_check,
        "criteria": _judge_check,
    }
    named = [name for name in kinds if name in value]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} exclude each other")
    if named:
        if "check" in value:
            raise ValueError(f"check is for lines without {named[0]}")
        return kinds[named[0]](value)
    return _text_check(value, value.get("check", default_check or "exact"))


def _text_check(value: Mapping[str, Any], how: Any) -> TextCheck:
    if how not in COMPARISONS:
        raise ValueError(f"check must be one of {', '.join(COMPARISONS)}")
    answer = value.get("answer")
    given = answer if isinstance(answer, list) else [answer]
    if not given or not all(isinstance(each, str | int | float) for each in given):
        raise ValueError("give answer: a text, a number, or a list of accepted ones")
    accepted = tuple(str(each) for each in given)
    if how == "number" and any(predicted_number(each) is None for each in accepted):
        raise ValueError("the answer has no number")
    return TextCheck(how, accepted)


def _choice_check(value: Mapping[str, Any]) -> ChoiceCheck:
    choices, answer = value["choices"], value.get("answer")
    is_list = isinstance(choices, list) and all(isinstance(each, str) for each in choices)
    if not is_list or len(choices) < 2 or not all(choices):
        raise ValueError("choices are a list of two or more texts")
    if isinstance(answer, str) and answer in choices:
        return ChoiceCheck(tuple(choices), choices.index(answer))
    if isinstance(answer, str) and len(answer) == 1 and answer.isalpha():
        answer = ord(answer.upper()) - ord("A")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ValueError("answer must be one of choices: its text, its letter, or its index from 0")
    return ChoiceCheck(tuple(choices), answer)


def _schema_check(value: Mapping[str, Any]) -> SchemaCheck:
    from engine_tools.evaluation.schemas import schema_fault

    if fault := schema_fault(value["schema"]):
        raise ValueError(f"schema: {fault}")
    return SchemaCheck(value["schema"], "answer" in value, value.get("answer"))


def _judge_check(value: Mapping[str, Any]) -> JudgeCheck:
    criteria, reference = value["criteria"], value.get("answer", "")
    if not isinstance(criteria, str) or not criteria or not isinstance(reference, str):
        raise ValueError("criteria and answer must be texts")
    return JudgeCheck(criteria, reference)
