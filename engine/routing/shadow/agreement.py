"""Decides whether two answers to the same greedy request agree.

Backends round differently. So at the first token where two answers differ, both tokens may have
been about equally likely. This is a near tie and counts as agreement. Everything after that token
depends on it and is not compared.
"""

import math
from dataclasses import dataclass
from os.path import commonprefix
from typing import Literal

from engine.core.interfaces.backend import TokenText
from engine.routing.shadow.compared_answer import ComparedAnswer

Verdict = Literal["identical", "tie", "different"]
END = "<end>"
_EXCERPT = 24  # characters shown of each text at the difference, if the answers have no tokens


@dataclass(frozen=True, slots=True)
class Gap:
    """How strongly two backends disagree about which of two tokens comes next, in nats.

    It is the sum over both backends of the difference in logprob between the backend's own token
    and the other's. `is_bound` means that `nats` is only a lower bound, because a token is not
    among the other backend's alternatives.
    """

    nats: float
    is_bound: bool


@dataclass(frozen=True, slots=True)
class Divergence:
    position: int  # number of tokens in the reference's answer before the difference
    reference: str
    other: str
    gap: Gap | None  # None if neither backend returns logprobs


@dataclass(frozen=True, slots=True)
class Agreement:
    verdict: Verdict
    divergence: Divergence | None
    # For each token before the divergence: absolute difference of the two logprobs.
    distances: tuple[float, ...]
    same_finish: bool


def compare_answers(reference: ComparedAnswer, other: ComparedAnswer, tie_nats: float) -> Agreement:
    same_finish = reference.finish_reason == other.finish_reason
    pairs = list(zip(reference.shown_tokens, other.shown_tokens, strict=False))
    common = next((i for i, (a, b) in enumerate(pairs) if not _same(a, b)), len(pairs))
    distances = tuple(
        abs(a.logprob - b.logprob)
        for a, b in pairs[:common]
        if math.isfinite(a.logprob) and math.isfinite(b.logprob)
    )
    if reference.said == other.said:
        return Agreement("identical", None, distances, same_finish)
    divergence = find_divergence(reference, other)
    gap = divergence.gap
    is_tie = gap is not None and not gap.is_bound and gap.nats <= tie_nats
    return Agreement("tie" if is_tie else "different", divergence, distances, same_finish)


def find_divergence(reference: ComparedAnswer, other: ComparedAnswer) -> Divergence:
    """The first difference of two answers. Tokens are compared if both answers have them, else
    characters.
    """
    for index, (a, b) in enumerate(zip(_ended(reference), _ended(other), strict=False)):
        if a is None or b is None or not _same(a, b):
            return Divergence(index, _shown(a), _shown(b), _gap(a, b))
    at = len(commonprefix([reference.said, other.said]))
    return Divergence(
        reference.tokens_until(at), _excerpt(reference, at), _excerpt(other, at), None
    )


def _ended(answer: ComparedAnswer) -> list[TokenText | None]:
    """The answer's tokens, then the token that ended it (None if the backend does not return that
    token).
    """
    if not answer.tokens:
        return []
    return [*answer.shown_tokens, answer.end_token]


def _same(a: TokenText, b: TokenText) -> bool:
    # Some servers return a token's bytes. Others return only its text, in which incomplete
    # characters are lost. So two tokens count as the same if their bytes or their texts match.
    return a.token_bytes == b.token_bytes or a.token == b.token


def _gap(a: TokenText | None, b: TokenText | None) -> Gap | None:
    if a is None or b is None:
        return None
    known = [lead for lead in (_lead(a, b), _lead(b, a)) if lead is not None]
    if not known:
        return None
    return Gap(sum(lead.nats for lead in known), any(lead.is_bound for lead in known))


def _lead(chosen: TokenText, rival: TokenText) -> Gap | None:
    """By how many nats the backend preferred its own token `chosen` to the other backend's token
    `rival`.
    """
    if not chosen.top or not math.isfinite(chosen.logprob):
        return None
    for each in chosen.top:
        if each.token_bytes == rival.token_bytes or each.token == rival.token:
            return Gap(max(chosen.logprob - each.logprob, 0.0), is_bound=False)
    lowest = min(each.logprob for each in chosen.top)
    return Gap(max(chosen.logprob - lowest, 0.0), is_bound=True)


def _shown(token: TokenText | None) -> str:
    return END if token is None else token.token


def _excerpt(answer: ComparedAnswer, at: int) -> str:
    return answer.said[at : at + _EXCERPT] or END
