"""Rotary frequencies by each scaling rule, at the ends where the rule is plain to see."""

import math

import numpy as np
import pytest

from engine.architectures.base import RopeConfig
from engine.core.errors import ModelFormatError
from engine.ir.rotary import rope_frequencies, rotary_tables

DIM, THETA = 32, 10_000.0
PLAIN = THETA ** (-np.arange(0, DIM, 2) / DIM)


def frequencies(max_seq_len: int = 64, **rule) -> np.ndarray:
    return rope_frequencies(RopeConfig(theta=THETA, dim=DIM, **rule), max_seq_len)[0]


def test_default_and_linear_rope_frequencies():
    np.testing.assert_allclose(frequencies(), PLAIN, rtol=1e-5)
    np.testing.assert_allclose(frequencies(kind="linear", factor=4.0), PLAIN / 4, rtol=1e-5)


def test_dynamic_rope_changes_only_beyond_the_trained_length():
    rule = {"kind": "dynamic", "factor": 2.0, "original_max_position": 64}
    np.testing.assert_allclose(frequencies(32, **rule), PLAIN, rtol=1e-5)
    np.testing.assert_allclose(frequencies(64, **rule), PLAIN, rtol=1e-5)
    theta = THETA * (2.0 * 256 / 64 - 1) ** (DIM / (DIM - 2))
    expected = theta ** (-np.arange(0, DIM, 2) / DIM)
    np.testing.assert_allclose(frequencies(256, **rule), expected, rtol=1e-4)


def test_llama3_rope_keeps_high_frequencies_and_stretches_low_ones():
    rule = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 256}
    found = frequencies(kind="llama3", factor=8.0, **rule)
    turns = 256 * PLAIN / (2 * math.pi)
    np.testing.assert_allclose(found[turns >= 4], PLAIN[turns >= 4], rtol=1e-5)
    np.testing.assert_allclose(found[turns <= 1], PLAIN[turns <= 1] / 8, rtol=1e-5)
    between = (turns > 1) & (turns < 4)
    keep = (turns[between] - 1) / 3
    expected = keep * PLAIN[between] + (1 - keep) * PLAIN[between] / 8
    assert between.any()
    np.testing.assert_allclose(found[between], expected, rtol=1e-4)


def test_yarn_keeps_high_frequencies_and_stretches_low_ones():
    rule = {"kind": "yarn", "factor": 4.0, "original_max_position": 256}
    found = frequencies(**rule, beta_fast=8.0, beta_slow=1.0)
    ratio = PLAIN / found
    assert ratio[0] == pytest.approx(1.0) and ratio[-1] == pytest.approx(4.0)
    assert (np.diff(ratio) >= -1e-4).all() and ((ratio > 1.01) & (ratio < 3.99)).any()
    turns = 256 * PLAIN / (2 * math.pi)
    assert ratio[turns > 16] == pytest.approx(1.0) and ratio[turns < 0.5] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("rule", "scale"),
    [
        ({"kind": "yarn", "factor": 4.0}, 0.1 * math.log(4) + 1),
        ({"kind": "yarn", "factor": 1.0}, 1.0),
        ({"kind": "yarn", "factor": 4.0, "attention_factor": 0.5}, 0.5),
        ({"kind": "linear", "factor": 4.0}, 1.0),
    ],
)
def test_only_yarn_scales_cosines_and_sines(rule, scale):
    rope = RopeConfig(theta=THETA, dim=DIM, original_max_position=64, **rule)
    found, told = rope_frequencies(rope, 64)
    assert told == pytest.approx(scale)
    cos, sin = rotary_tables(rope, 5)
    np.testing.assert_allclose(cos, np.cos(np.arange(5)[:, None] * found) * scale, atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(np.arange(5)[:, None] * found) * scale, atol=1e-5)


def test_stored_rope_factors_divide_frequencies_and_are_required():
    rope = RopeConfig(theta=THETA, dim=DIM, kind="factors")
    factors = np.linspace(1, 8, DIM // 2, dtype=np.float32)
    np.testing.assert_allclose(rope_frequencies(rope, 64, factors)[0], PLAIN / factors, rtol=1e-5)
    for wrong in (None, factors[:-1]):
        with pytest.raises(ModelFormatError, match=r"rope\.factors"):
            rope_frequencies(rope, 64, wrong)
