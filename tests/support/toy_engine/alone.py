"""What a request must give on the toy model, computed without an engine or a batch."""

from dataclasses import replace

import numpy as np

from engine.core.interfaces.request import SamplingParams
from tests.support.references.sampler_reference import Reference
from tests.support.toy_engine.runner import (
    CRASH_TOKEN,
    NAN_TOKEN,
    VOCAB,
    Draw,
    History,
    mix,
    sample_row,
    toy_logits,
)


def _offered(logits: np.ndarray, allowed: frozenset[int] | None, bias) -> np.ndarray:
    """The float32 logits, without the tokens that must not be sampled."""
    offered = logits.astype(np.float32)
    banned = {token for token, value in bias if value == float("-inf")}
    banned |= set(range(VOCAB)) - (allowed if allowed is not None else set(range(VOCAB)))
    offered[sorted(banned)] = -np.inf
    return offered


def generate_alone(
    prompt: tuple[int, ...],
    params: SamplingParams,
    choice: int,
    stop_ids: frozenset[int],
    max_seq_len: int,
    matcher=None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    breakers: tuple[tuple[int, ...], ...] = (),
) -> tuple[list[int], str]:
    """The tokens and finish reason of a request, computed without an engine.

    `matcher` is in the start state of the request's grammar.
    """
    assert params.seed is not None
    if CRASH_TOKEN in prompt or NAN_TOKEN in prompt:
        return [], "error"
    cells, parent = [], 1
    for token in prompt:
        parent = mix(parent, token)
        cells.append(parent)
    history = History(list(prompt), [])
    reference = Reference(params, prompt, params.seed, choice, bad_words, breakers, history.output)
    while True:
        allowed = None if matcher is None else _allowed(matcher)
        if params.allowed_token_ids:
            allowed = frozenset(params.allowed_token_ids) & (allowed or frozenset(range(VOCAB)))
        bias = list(params.logit_bias.items())
        if len(history.output) < params.min_tokens:
            bias += [(token, float("-inf")) for token in stop_ids]
        bias += [(token, float("-inf")) for token in reference.banned()]
        lost = reference.dry([*prompt, *history.output])
        bias += [(token, -penalty) for token, penalty in lost.items()]
        draw = _draw(params, choice, tuple(bias), allowed, len(cells))
        if params.sampled_on_host:
            token = reference.next_token(_offered(toy_logits(cells), allowed, bias))
        else:
            token = sample_row(toy_logits(cells), draw, history)
            history.output.append(token)
        if token in stop_ids and len(history.output) > params.min_tokens:
            return history.output, "stop"
        if matcher is not None:
            assert matcher.consume_token(token)
            if matcher.is_stopped():
                return history.output, "stop"
        if len(history.output) >= params.max_tokens or len(cells) + 1 >= max_seq_len:
            return history.output, "length"
        parent = mix(parent, token)
        cells.append(parent)


def _draw(
    params: SamplingParams,
    choice: int,
    bias: tuple[tuple[int, float], ...],
    allowed: frozenset[int] | None,
    position: int,
) -> Draw:
    draw = Draw(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        bias=bias,
        allowed=allowed,
        seed=params.seed,
        choice=choice,
        position=position,
    )
    return replace(draw, **{k: float(np.float32(getattr(draw, k))) for k in _F32})


def _allowed(matcher) -> frozenset[int]:
    mask = matcher.compute_bitmask()
    return frozenset(token for token in range(VOCAB) if mask[token // 8] >> (token % 8) & 1)


# These parameters are passed to the runner as float32.
_F32 = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
