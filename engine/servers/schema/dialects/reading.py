"""Reads the parameters of a request body by the table of `words.py`."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from engine.core.errors import InvalidRequestError
from engine.servers.http.errors import problem
from engine.servers.schema.dialects.parameters import PARAMETERS, Parameter

_MAX_NAMED = 10
# They are a header of the answer, and objects of parameters may be nested.
_MAX_WARNINGS = 32

Verdict = Literal["acts", "translated", "warned", "refused"]


@dataclass(slots=True)
class Reading:
    """The parameters of a request under this server's names."""

    values: dict[str, Any] = field(default_factory=dict)
    sent_as: dict[str, str] = field(default_factory=dict)  # names of converted parameters
    warnings: list[tuple[str, str]] = field(default_factory=list)  # parameter, message

    def warn(self, name: str, message: str) -> None:
        if len(self.warnings) < _MAX_WARNINGS:
            self.warnings.append((name[:200], message))


def read_words(
    body: Mapping[str, Any],
    known: Collection[str],
    words: Mapping[str, Parameter] = PARAMETERS,
    *,
    warns: bool = True,
    ignores: bool = False,
) -> Reading:
    """Keep the `known` parameters and convert those that `words` has a conversion for. A parameter
    that would only cause a warning is refused unless `warns`. Raises `InvalidRequestError` about a
    parameter that is not supported, unless its value has no effect. If `ignores`, there is a
    warning instead.
    """
    reading = Reading()
    unknown: list[str] = []
    pending = [(name, name, value) for name, value in body.items()]
    for sent, name, value in pending:
        if name in known:
            _keep(reading, sent, name, value)
            continue
        word = words.get(name)
        if word is None:
            unknown.append(sent)
        elif value is None:
            continue
        elif word.convert is not None and _applies(word, known):
            # Also a value that turns something off, because the model's preset may turn it on.
            is_spread = not word.target
            for inner, each in word.convert(value, sent, known).items():
                pending.append((f"{sent}.{inner}" if is_spread else sent, inner, each))
        elif asks_for_nothing(value, word.off):
            continue
        elif word.warning and warns:
            reading.warn(sent, word.warning)
        elif ignores:
            reading.warn(sent, f"has no effect here; {word.instead}")
        else:
            raise InvalidRequestError(
                f"{sent} is not supported by this endpoint; {word.instead}.",
                param=sent,
                code="unsupported_parameter",
            )
    if unknown and not ignores:
        raise _unknown(unknown, known)
    if unknown:
        reading.warn(_listed(unknown), "not known here, so without effect")
    return reading


def _keep(reading: Reading, sent: str, name: str, value: Any) -> None:
    other = reading.values.get(name)
    if other is None:
        reading.values[name] = value
        if sent != name:
            reading.sent_as[name] = sent
    elif value is not None and value != other:
        first = reading.sent_as.get(name, name)
        raise problem(sent, f"says something else than {first}; send one of them")


def _applies(word: Parameter, known: Collection[str]) -> bool:
    return word.target in known if word.target else "max_tokens" in known


def _unknown(names: list[str], known: Collection[str]) -> InvalidRequestError:
    nearest = get_close_matches(names[0][:64], known, n=1)
    meant = f" Did you mean {nearest[0]}?" if nearest else ""
    return InvalidRequestError(
        f"Unknown parameter: {_listed(names)}.{meant}",
        param=names[0][:64],
        code="unknown_parameter",
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:64] for name in names[:_MAX_NAMED])
    return f"{shown} and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else shown


def asks_for_nothing(value: Any, off_values: Iterable[Any]) -> bool:
    """Whether a parameter has no effect: `value` is null or one of `off_values`."""
    # Types are compared too, because `1 == True` in Python but not in JSON.
    return value is None or any(type(value) is type(each) and value == each for each in off_values)


def verdict(word: Parameter, known: Collection[str]) -> Verdict:
    """What an endpoint with the `known` parameters does with the parameter."""
    if word.name in known:
        return "warned" if word.warning else "acts"
    if word.convert is not None and _applies(word, known):
        return "translated"
    return "warned" if word.warning else "refused"
