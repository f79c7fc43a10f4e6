"""What frameworks share on the way to a device and back: settings, weights, runs, results."""

from dataclasses import fields, make_dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from engine.architectures.base import ExpertsConfig, LayerConfig, ModelConfig
from engine.core.errors import ConfigError, ModelFormatError
from engine.runners.layout import ALIGNMENT, Layout
from engine.runners.parameters import (
    check_decoder,
    parameter_tree,
    rope_factors,
)
from engine.runners.refusals import check_config
from engine.runners.runs import cut
from engine.runners.scoring import alibi_slopes
from engine.runners.settings import (
    KEEPS,
    PADS,
    settings_arrays,
    settings_sizes,
    settings_views,
)
from engine.runtime.model_runner import SAMPLE, SamplingInputs
from engine.runtime.outputs import Sampled, step_output
from engine.runtime.samplers.host_sampler import row_keys
from tests.parity.runner_driver import sampling_inputs

NOBODY = 8
GIVEN = {
    "temperature": [0.5, 0.0, 1.5],
    "top_k": [3, 0, 9],
    "top_p": [0.25, 1.0, 0.5],
    "min_p": [0.125, 0.0, 0.75],
    "repetition": [1.5, 1.0, 0.5],
    "presence": [0.25, 0.0, -0.5],
    "frequency": [0.75, 0.0, -0.25],
    "seed": [7, 8, 2**62],
    "choice": [0, 1, 2],
    "forced": [SAMPLE, 5, SAMPLE],
    "bias_rows": [0, 2],
    "bias_ids": [4, 6],
    "bias_values": [1.5, -2.5],
}
SLOTS, POSITIONS = [6, 1, 3], [10, 11, 12]


def sampling() -> SamplingInputs:
    return sampling_inputs(range(3), SLOTS, POSITIONS, **GIVEN)


def unpacked(rows: int, biases: int, given: SamplingInputs) -> dict[str, np.ndarray]:
    layout = Layout(settings_sizes(rows, biases), PADS | {KEEPS: NOBODY})
    packed = layout.packed(settings_arrays(given, NOBODY))
    return settings_views(layout, packed, np.float32)


def test_sampling_settings_are_packed_and_unpacked_unchanged():
    given = sampling()
    views = unpacked(3, 2, given)
    for name in (*GIVEN, "slots"):
        if name not in ("seed", "choice"):  # they travel as keys
            np.testing.assert_array_equal(views[name], getattr(given, name), err_msg=name)
    keys = row_keys(given.seed, given.choice, given.position)
    np.testing.assert_array_equal(views["keys"], keys)
    assert len({tuple(key) for key in keys.tolist()}) == 3
    np.testing.assert_array_equal(views[KEEPS], [6, NOBODY, 3])


def test_every_sampling_field_reaches_the_device_or_is_listed():
    """A new field of `SamplingInputs` has to be given to devices, or be named here."""
    elsewhere = {"sample_rows", "seed", "choice", "position", "mask", "hidden_rows", "num_logprobs"}
    elsewhere.add("host_rows")  # devices get their tokens as forced ones
    histories = {field.name for field in fields(SamplingInputs) if "history" in field.name}
    stated = {field.name for field in fields(SamplingInputs)} - elsewhere - histories
    assert stated | {"keys", KEEPS} == set(settings_sizes(1, 1))


def test_padding_rows_sample_greedily_and_keep_no_token():
    views = unpacked(8, 4, sampling())
    plain = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition": 1, "presence": 0}
    for name, value in (plain | {"frequency": 0, "forced": SAMPLE, KEEPS: NOBODY}).items():
        np.testing.assert_array_equal(views[name][3:], [value] * 5, err_msg=name)
    assert views["bias_values"].tolist() == [1.5, -2.5, 0.0, 0.0]


def test_greedy_rows_need_no_random_keys():
    greedy = sampling_inputs(range(2), [0, 1], [3, 4])
    assert not unpacked(2, 0, greedy)["keys"].any()


def test_packed_arrays_do_not_overlap_and_the_last_has_variable_length():
    layout = Layout({"a": 3, "b": 5}, {"a": 9}, last="c")
    arrays = {
        "a": np.array([1, 2], np.int32),
        "b": np.arange(5, dtype=np.int32),
        "c": np.array([[7, 8, 9]], np.int32),
    }
    assert layout.size == 3 * ALIGNMENT and layout.length(arrays) == layout.size + 3
    views = layout.views(layout.packed(arrays), {})
    assert views["a"].tolist() == [1, 2, 9]
    assert (views["b"].tolist(), views["c"].tolist()) == ([0, 1, 2, 3, 4], [7, 8, 9])
    assert "a" in layout and "c" not in layout


def test_weights_become_a_nested_parameter_tree():
    names = [
        *("embed.weight", "layers.1.attn.q.weight", "layers.0.attn.v.bias", "norm.weight"),
        "rope.factors",
    ]
    weights = {
        name: SimpleNamespace(numpy=lambda number=number: np.arange(6) + 10 * number)
        for number, name in enumerate(names)
    }
    placed = []
    tree = parameter_tree(
        weights,
        lambda weight: weight.numpy(),
        lambda name, values: placed.append(name) or values.tolist(),
    )
    assert tree["embed"]["weight"] == [0, 1, 2, 3, 4, 5]
    assert tree["layers"][1]["attn"] == {"q": {"weight": [10, 11, 12, 13, 14, 15]}}
    assert tree["layers"][0]["attn"]["v"]["bias"] == [20, 21, 22, 23, 24, 25]
    assert placed == names[:-1]
    assert rope_factors(weights).tolist() == list(range(40, 46))
    assert rope_factors({}) is None


def test_more_than_ten_layers_keep_their_numeric_order():
    weights = {f"layers.{i}.w": SimpleNamespace(numpy=lambda i=i: i) for i in reversed(range(12))}
    tree = parameter_tree(weights, lambda weight: weight.numpy(), lambda name, value: value)
    assert [layer["w"] for layer in tree["layers"]] == list(range(12))


@pytest.mark.parametrize(
    ("counts", "rows", "before"),
    [
        ([3], [0], [0]),
        ([4, 5], [0, 1, 1], [0, 0, 4]),
        ([9, 0, 8], [0, 0, 0, 2, 2], [0, 4, 8, 0, 4]),
    ],
)
def test_rows_are_cut_into_tiles_that_cover_them(counts, rows, before):
    found = cut(np.array(counts, np.int32), 4)
    assert [each.tolist() for each in found] == [rows, before]
    assert all(each.dtype == np.int32 for each in found)


def test_a_steps_output_is_trimmed_to_its_rows_and_requested_logprobs():
    given = sampling_inputs(range(2), [0, 1], [3, 4], num_logprobs=[-1, 2], hidden_rows=[1])
    padded = Sampled(
        tokens=np.arange(4),
        logprobs=np.arange(4) * -1.0,
        top_ids=np.arange(20).reshape(4, 5),
        top_logprobs=np.arange(20).reshape(4, 5) * -1.0,
    )
    hidden = np.arange(8, dtype=np.float32).reshape(4, 2)
    finite = np.array([True, True, True, False, True, False, False])
    query_start = np.array([0, 2, 5], np.int32)
    found = step_output(padded, hidden, finite, query_start, given)
    assert found.tokens.tolist() == [0, 1] and found.finite.tolist() == [True, False]
    assert found.logprobs.tolist() == [0.0, -1.0]
    assert found.top_ids.tolist() == [[0, 1], [5, 6]]
    assert found.top_logprobs.tolist() == [[0.0, -1.0], [-5.0, -6.0]]
    assert found.hidden.tolist() == [[2.0, 3.0]]
    plain = step_output(Sampled(np.arange(4)), None, finite, query_start, given)
    assert (plain.tokens.tolist(), plain.logprobs, plain.hidden) == ([0, 1], None, None)
    spare_slot = step_output(None, None, finite, query_start, given)
    assert (spare_slot.tokens.tolist(), spare_slot.finite.tolist()) == ([], [True, False])


def test_learned_positions_bound_the_context_length() -> None:
    model = SimpleNamespace(learned_positions=True, max_position=8)

    def check(max_seq_len: int) -> None:
        config = SimpleNamespace(
            kv_dtype="auto",
            dtype="float32",
            affinity="auto",
            numerics="auto",
            max_seq_len=max_seq_len,
        )
        check_config("jax", "JAX", model, config)

    check(8)
    with pytest.raises(ConfigError, match="max_seq_len 9 is beyond the model's 8"):
        check(9)


CONFIG = ModelConfig("toy", 9, 8, 2, 6, 2, 4, 8, 16, 1e-5, True, None)


@pytest.mark.parametrize("kind", [ModelConfig, LayerConfig, ExpertsConfig])
def test_a_setting_that_no_decoder_knows_is_refused_by_name(kind):
    """A field that is added to a config later, without code that reads it, must not be ignored."""
    parts = {
        LayerConfig: LayerConfig(None, None, True),
        ExpertsConfig: ExpertsConfig(4, 2, 8),
        ModelConfig: CONFIG,
    }
    later = make_dataclass("Later", [("twist", int, 0)], bases=(kind,), frozen=True)
    known = {field.name: getattr(parts[kind], field.name) for field in fields(kind)}

    def check(twist: int) -> None:
        made = parts | {kind: later(**known, twist=twist)}
        layers = (made[LayerConfig],) * CONFIG.num_layers
        check_decoder(replace(made[ModelConfig], layers=layers, experts=made[ExpertsConfig]), "jax")

    check(0)
    with pytest.raises(ModelFormatError, match="jax .* 'twist'.* 'toy'.*native"):
        check(1)


def test_alibi_slopes_for_a_head_count_that_is_no_power_of_two():
    """By hand: eight heads have 1/2, 1/4, ... 1/256; six take every second, then the others."""
    assert alibi_slopes(CONFIG) is None
    eight = alibi_slopes(replace(CONFIG, num_heads=8, alibi_bias=8.0))
    np.testing.assert_allclose(eight, [0.5**power for power in range(1, 9)])
    six = alibi_slopes(replace(CONFIG, num_heads=6, alibi_bias=8.0))
    np.testing.assert_allclose(six, [0.5**power for power in (2, 4, 6, 8, 1, 3)])
