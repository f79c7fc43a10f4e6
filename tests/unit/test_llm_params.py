"""Sampling parameters given to the Python API: what means nothing is refused, NaN included."""

import math

import pytest

from engine import SamplingParams
from engine.backends.custom.frontend.prompts import check_params as check_against_model
from engine.core.errors import InvalidRequestError
from engine.llm import check_params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("logit_bias", {1: math.nan}),
        ("seed", 2**63),
        ("logprobs", -1),
    ],
)
def test_what_means_nothing_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=name):
        check_params(SamplingParams(**{name: value}))


def test_more_logprobs_than_there_are_tokens_are_refused():
    check_against_model(SamplingParams(logprobs=97), 97)
    with pytest.raises(InvalidRequestError, match="logprobs must be at most 97"):
        check_against_model(SamplingParams(logprobs=98), 97)


def test_defaults_and_bans_pass():
    check_params(SamplingParams(max_tokens=None, logit_bias={1: -math.inf}, seed=2**63 - 1))
