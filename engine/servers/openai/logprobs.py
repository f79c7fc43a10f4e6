"""The logprobs objects of OpenAI's API: that of chats, and that of `/v1/completions`."""

import math
from collections.abc import Sequence
from typing import Any

from engine.core.interfaces.backend import TokenText, TopLogprob

# The lowest logprob that is sent, because JSON has no infinity. OpenAI's clients take this number
# as a probability of 0.
_MIN_LOGPROB = -9999.0
# The bytes that continue a character of several bytes in UTF-8.
_CONTINUATIONS = bytes(range(0x80, 0xC0))
_CONTINUATION_BYTES = frozenset(bytes([each]) for each in _CONTINUATIONS)


def clamped(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


def _chat_entry(token: TokenText | TopLogprob) -> dict[str, Any]:
    return {
        "token": token.token,
        "logprob": clamped(token.logprob),
        "bytes": list(token.token_bytes),
    }


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    content = [
        _chat_entry(token) | {"top_logprobs": [_chat_entry(each) for each in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def legacy_logprobs(tokens: Sequence[TokenText], offset: int) -> dict[str, Any]:
    """The logprobs object of `/v1/completions`, which has parallel lists. `offset` is the position
    of the first token in the text.
    """
    offsets: list[int] = []
    for token in tokens:
        # A token may start inside of a character.
        is_inside = token.in_text and token.token_bytes[:1] in _CONTINUATION_BYTES
        offsets.append(offset - 1 if is_inside and offset else offset)
        offset += num_characters(token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [
            None if math.isnan(token.logprob) else clamped(token.logprob) for token in tokens
        ],
        "top_logprobs": [_ranked(token) for token in tokens],
        "text_offset": offsets,
    }


def num_characters(token: TokenText) -> int:
    """The number of characters that start in this token and are part of the text."""
    if not token.in_text:
        return 0
    if not token.token_bytes:
        return len(token.token)  # a remote server that tells no bytes
    return len(token.token_bytes.translate(None, _CONTINUATIONS))


def _ranked(token: TokenText) -> dict[str, float] | None:
    """Maps token texts to log-probabilities, for the most likely tokens and the sampled token. None
    for the first token of a prompt, which has no probability.
    """
    if math.isnan(token.logprob):
        return None
    ranked = {token.token: clamped(token.logprob)}
    for each in token.top:
        ranked.setdefault(each.token, clamped(each.logprob))
    return ranked
