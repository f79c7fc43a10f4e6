"""Logit biases and token masks. DRY and bad words depend on the output so far. They become biases
of single tokens in each step, so every device sampler supports them.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.runtime.model_runner import ALL_ALLOWED, F32, I32, U32

if TYPE_CHECKING:
    from engine.runtime.sequence import Row

Breakers = dict[int, list[tuple[int, ...]]]  # the first token of a breaker -> its other tokens
LOG_MAX_FLOAT = 88.7  # a little less than the logarithm of the largest float32
# Max number of comparisons that DRY makes for a token, about 15 ms. The lengths of repetitions that
# were not compared to their end count as the length that was reached.
MAX_COMPARISONS = 2**21
MAX_PENALTY = 1e38  # so that a penalized logit stays finite in float32
NEGATIVE_INFINITY = float("-inf")


def logit_biases(rows: "Iterable[tuple[int, Row]]") -> tuple[I32, I32, F32]:
    """The logit biases of these rows as three arrays: row index, token id, value. Stop tokens have
    the bias -inf until the sequence has generated `min_tokens` tokens.
    """
    entries: list[tuple[int, int, float]] = []
    for index, row in rows:
        seq, params, rules = row.seq, row.seq.params, row.seq.rules
        entries.extend((index, token, bias) for token, bias in params.logit_bias.items())
        if row.start + row.length - seq.num_prompt < params.min_tokens:
            entries.extend((index, token, NEGATIVE_INFINITY) for token in seq.stop_ids)
        if rules is not None and rules.bad_words:
            banned = banned_by_words(seq.tokens, seq.num_prompt, rules.bad_words)
            entries.extend((index, token, NEGATIVE_INFINITY) for token in banned)
        if params.dry_multiplier > 0:
            window = params.dry_penalty_last_n
            tokens = seq.tokens if window < 0 else seq.tokens[max(0, len(seq.tokens) - window) :]
            lost = dry_penalties(
                np.array(tokens, np.int32),
                {} if rules is None else rules.dry_breakers,
                params.dry_multiplier,
                params.dry_base,
                params.dry_allowed_length,
            )
            entries.extend((index, token, -penalty) for token, penalty in lost.items())
    return (
        np.array([entry[0] for entry in entries], np.int32),
        np.array([entry[1] for entry in entries], np.int32),
        np.array([entry[2] for entry in entries], np.float32),
    )


def by_first_token(breakers: Iterable[tuple[int, ...]]) -> Breakers:
    found: Breakers = {}
    for first, *others in breakers:
        found.setdefault(first, []).append(tuple(others))
    return found


def dry_penalties(
    tokens: I32, breakers: Breakers, multiplier: float, base: float, allowed_length: int
) -> dict[int, float]:
    """The DRY penalties: token id -> what its logit loses.

    A token is penalized if it would continue a repetition. That is, the last L tokens also occur
    earlier in `tokens`, followed by this token, and L is at least `allowed_length`. The penalty is
    multiplier * base ** (L - allowed_length), for the largest such L. A repetition does not extend
    over a sequence breaker, and a breaker of one token is never penalized.
    """
    longest = _since_breaker(tokens, breakers)
    if longest < allowed_length:
        return {}
    max_exponent = int(LOG_MAX_FLOAT / math.log(base)) if base > 1.000001 else 0
    longest = min(longest, allowed_length + max_exponent)
    lengths = _repeat_lengths(tokens, longest)
    is_long = lengths >= allowed_length
    next_tokens, lengths = tokens[1:][is_long], lengths[is_long]
    order = np.argsort(lengths, kind="stable")  # the longest repetition of a token comes last
    pairs = zip(next_tokens[order].tolist(), lengths[order].tolist(), strict=True)
    return {
        token: min(multiplier * base ** (length - allowed_length), MAX_PENALTY)
        for token, length in dict(pairs).items()
        if token >= 0 and () not in breakers.get(token, ())
    }


def _repeat_lengths(tokens: I32, longest: int) -> I32:
    """For each position except the last: how many tokens up to this position equal the last tokens
    of the text, but at most `longest`.
    """
    lengths = np.zeros(max(len(tokens) - 1, 0), np.int32)
    ends = np.arange(len(lengths))
    num_comparisons = 0
    for length in range(longest):
        num_comparisons += len(ends)
        if num_comparisons > MAX_COMPARISONS:
            break
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[-1 - length]]
        if not len(ends):
            break
        lengths[ends] = length + 1
    return lengths


def _since_breaker(tokens: I32, breakers: Breakers) -> int:
    """The number of tokens after the last sequence breaker."""
    if not breakers:
        return len(tokens)
    starts: list[int] = np.flatnonzero(np.isin(tokens, list(breakers)))[::-1].tolist()
    for start in starts:
        tails = breakers[int(tokens[start])]
        rest = tuple(tokens[start + 1 : start + 1 + max(map(len, tails))].tolist())
        matched = [len(tail) for tail in tails if rest[: len(tail)] == tail]
        if matched:
            return len(tokens) - 1 - start - max(matched)
    return len(tokens)


def banned_by_words(
    tokens: Sequence[int], num_prompt: int, bad_words: Sequence[tuple[int, ...]]
) -> list[int]:
    """The tokens that would complete a bad word. A word of several tokens bans its last token, if
    the output ends with the tokens before it.
    """
    longest = max(map(len, bad_words), default=0)
    tail = tuple(tokens[max(num_prompt, len(tokens) - longest) :])
    return [word[-1] for word in bad_words if len(word) == 1 or tail[1 - len(word) :] == word[:-1]]


def allowed_mask(token_ids: Iterable[int], vocab_size: int) -> U32:
    """A mask with one bit per token, in which the bits of `token_ids` are set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def with_allowed(mask: U32 | None, row: int, allowed: U32, num_rows: int) -> U32:
    """The mask of a step, after one of its rows was restricted to the tokens in `allowed`."""
    if mask is None:
        mask = np.full((num_rows, len(allowed)), ALL_ALLOWED, np.uint32)
    mask[row] &= allowed
    return mask
