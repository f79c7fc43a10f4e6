"""The layers of frameworks whose layers are functions, each against its definition in numpy."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

RNG = np.random.default_rng(5)
EPS = 1e-2  # large, so that a lost one shows


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@cache
def jax_framework() -> SimpleNamespace:
    import jax.numpy as jnp

    from engine.backends.custom.frameworks.jax.layers.rotary import Rotation

    def rotation(cos: np.ndarray, sin: np.ndarray) -> Rotation:
        return Rotation(jnp.array(cos)[:, None], jnp.array(sin)[:, None])

    return SimpleNamespace(name="jax", array=jnp.array, numpy=np.asarray, rotation=rotation)


@cache
def tinygrad_framework() -> SimpleNamespace:
    from tinygrad import Tensor

    from engine.backends.custom.frameworks.tinygrad.layers.rotary import Rotation

    def array(given: np.ndarray) -> Tensor:
        return Tensor(given, device="CPU")

    return SimpleNamespace(
        name="tinygrad",
        array=array,
        numpy=lambda tensor: tensor.numpy(),
        rotation=lambda cos, sin: Rotation(array(cos), array(sin)),
    )


pytestmark = pytest.mark.seconds  # two frameworks are imported, and compile


@pytest.fixture(params=[jax_framework, tinygrad_framework], ids=["jax", "tinygrad"])
def framework(request: pytest.FixtureRequest) -> SimpleNamespace:
    made: SimpleNamespace = request.param()
    return made


def layer(framework: SimpleNamespace, module: str, name: str) -> Callable[..., Any]:
    path = f"engine.backends.custom.frameworks.{framework.name}.layers.{module}"
    found: Callable[..., Any] = getattr(import_module(path), name)
    return found


def part(framework: SimpleNamespace, **arrays: np.ndarray) -> dict[str, Any]:
    return {name: framework.array(each) for name, each in arrays.items()}


def close(framework: SimpleNamespace, found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(framework.numpy(found), expected, rtol=1e-4, atol=1e-5)


def test_products_add_their_bias_if_they_have_one(framework):
    x, weight, bias = values(3, 4), values(5, 4), values(5)
    linear = layer(framework, "linear", "linear")
    plain = linear(part(framework, weight=weight), framework.array(x))
    close(framework, plain, x @ weight.T)
    biased = linear(part(framework, weight=weight, bias=bias), framework.array(x))
    close(framework, biased, x @ weight.T + bias)


def test_norms(framework):
    x, weight, bias = values(3, 8), values(8), values(8)
    rms = layer(framework, "norm", "rms_norm")(
        part(framework, weight=weight), framework.array(x), EPS
    )
    close(framework, rms, x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight)
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS)
    found = layer(framework, "norm", "layer_norm")(
        part(framework, weight=weight, bias=bias), framework.array(x), EPS
    )
    close(framework, found, normed * weight + bias)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_feed_forward_halves(framework):
    x, gate, up, down = values(3, 4), values(6, 4), values(6, 4), values(4, 6)
    params = {
        name: part(framework, weight=each)
        for name, each in (("gate", gate), ("up", up), ("down", down))
    }
    found = layer(framework, "mlp", "gated_mlp")(params, framework.array(x), "silu")
    close(framework, found, (silu(x @ gate.T) * (x @ up.T)) @ down.T)
    found = layer(framework, "mlp", "mlp")(params, framework.array(x), "gelu_tanh")
    close(framework, found, gelu_tanh(x @ up.T) @ down.T)


@pytest.mark.parametrize("half", [2, 4], ids=["partly", "wholly"])
def test_heads_are_turned_by_their_positions(framework, half):
    x, angles = values(3, 2, 8), values(3, half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    expected = (first * cos - second * sin, second * cos + first * sin, rest)
    turn = framework.rotation(np.cos(angles), np.sin(angles))
    found = layer(framework, "rotary", "rotate")(framework.array(x), turn)
    close(framework, found, np.concatenate(expected, axis=-1))


@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_sequence_attends_to_what_came_before_it(framework, window):
    """Heads of a group read the same keys: query heads 0 and 1 those of head 0."""
    q, k, v = values(5, 4, 8), values(5, 2, 8), values(5, 2, 8)
    expected = np.zeros_like(q)
    for token in range(5):
        first = 0 if window is None else max(0, token - window + 1)
        for head in range(4):
            keys, read = k[first : token + 1, head // 2], v[first : token + 1, head // 2]
            weights = np.exp(keys @ q[token, head] * 0.3)
            expected[token, head] = weights / weights.sum() @ read
    attend = layer(framework, "attention", "causal_attention")
    close(framework, attend(*map(framework.array, (q, k, v)), window, 0.3), expected)


@pytest.mark.parametrize("qk_norm", [None, "head", "whole"])
def test_heads_are_cut_from_their_products_normed_and_turned(framework, qk_norm):
    x, angles = values(3, 6), values(3, 2)
    weights = {"q": values(8, 6), "k": values(4, 6), "v": values(4, 6)}
    sizes = {"q_norm": 8, "k_norm": 4} if qk_norm == "whole" else {"q_norm": 4, "k_norm": 4}
    norms = {name: values(size) for name, size in sizes.items()}
    params = {name: part(framework, weight=each) for name, each in (weights | norms).items()}
    turn = framework.rotation(np.cos(angles), np.sin(angles))
    config = SimpleNamespace(head_dim=4, qk_norm=qk_norm, norm_eps=EPS)
    found = layer(framework, "attention", "heads")(params, config, framework.array(x), turn)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    for name, each in zip("qkv", found, strict=True):
        expected = x @ weights[name].T
        if qk_norm == "head":
            expected = expected.reshape(3, -1, 4)
        if qk_norm is not None and name != "v":
            expected /= np.sqrt((expected**2).mean(-1, keepdims=True) + EPS)
            expected *= norms[f"{name}_norm"]
        expected = expected.reshape(3, -1, 4)
        if name != "v":
            first, second = expected[..., :2], expected[..., 2:]
            expected = np.concatenate(
                (first * cos - second * sin, second * cos + first * sin), axis=-1
            )
        close(framework, each, expected)


def test_steps_are_padded_to_few_sizes():
    from engine.backends.custom.frameworks.jax.execution.buckets import padded_rows
    from engine.backends.custom.frameworks.tinygrad.execution.runner import padded_size

    assert [padded_rows(count) for count in (1, 2, 3, 8, 9, 17)] == [2, 2, 8, 8, 16, 32]
    assert [padded_size(count) for count in (1, 2, 8, 9, 32, 33)] == [1, 8, 8, 32, 32, 128]


def test_attention_items_cover_each_row_and_single_queries_come_first():
    from engine.backends.custom.frameworks.jax.execution.buckets import attention_items

    counts = np.array([5, 1, 4], np.int32)
    query_start = np.array([0, 5, 6, 10], np.int32)
    tokens, lengths, rows = attention_items(query_start, counts, 4)
    assert (tokens.tolist(), lengths.tolist(), rows.tolist()) == (
        *([4, 5, 0, 6], [1, 1, 4, 4]),
        [0, 1, 0, 2],
    )
    singles = attention_items(np.arange(4, dtype=np.int32), np.ones(3, np.int32), 1)
    assert [each.tolist() for each in singles] == [[0, 1, 2], [1, 1, 1], [0, 1, 2]]
