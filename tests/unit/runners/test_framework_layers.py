"""The layers of frameworks whose layers are functions, each against its definition in numpy."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.architectures.base import ExpertsConfig
from engine.runners.scoring import Scoring

RNG = np.random.default_rng(5)
EPS = 1e-2  # large, so that a lost one shows


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@cache
def jax_framework() -> SimpleNamespace:
    import jax.numpy as jnp

    from engine.jax.kernels.work import PerHead
    from engine.jax.layers.rotary import Rotation

    def rotation(cos: np.ndarray, sin: np.ndarray) -> Rotation:
        return Rotation(jnp.array(cos)[:, None], jnp.array(sin)[:, None])

    return SimpleNamespace(
        name="jax", array=jnp.array, numpy=np.asarray, rotation=rotation, per_head=PerHead
    )


@cache
def tinygrad_framework() -> SimpleNamespace:
    from tinygrad import Tensor

    from engine.tinygrad.kernels.attention import PerHead
    from engine.tinygrad.layers.rotary import Rotation

    def array(given: np.ndarray) -> Tensor:
        return Tensor(given, device="CPU")

    return SimpleNamespace(
        name="tinygrad",
        array=array,
        numpy=lambda tensor: tensor.numpy(),
        rotation=lambda cos, sin: Rotation(array(cos), array(sin)),
        per_head=PerHead,
    )


pytestmark = pytest.mark.seconds  # two frameworks are imported, and compile


@pytest.fixture(params=[jax_framework, tinygrad_framework], ids=["jax", "tinygrad"])
def framework(request: pytest.FixtureRequest) -> SimpleNamespace:
    made: SimpleNamespace = request.param()
    return made


def layer(framework: SimpleNamespace, module: str, name: str) -> Callable[..., Any]:
    path = f"engine.{framework.name}.layers.{module}"
    found: Callable[..., Any] = getattr(import_module(path), name)
    return found


def part(framework: SimpleNamespace, **arrays: np.ndarray) -> dict[str, Any]:
    return {name: framework.array(each) for name, each in arrays.items()}


def close(framework: SimpleNamespace, found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(framework.numpy(found), expected, rtol=1e-4, atol=1e-5)


def test_linear_adds_an_optional_bias(framework):
    x, weight, bias = values(3, 4), values(5, 4), values(5)
    linear = layer(framework, "linear", "linear")
    plain = linear(part(framework, weight=weight), framework.array(x))
    close(framework, plain, x @ weight.T)
    biased = linear(part(framework, weight=weight, bias=bias), framework.array(x))
    close(framework, biased, x @ weight.T + bias)


def test_rms_norm_and_layer_norm_equal_numpy(framework):
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
    found = layer(framework, "norm", "layer_norm")(
        part(framework, weight=weight), framework.array(x), EPS
    )
    close(framework, found, normed * weight)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_gated_and_plain_mlp_equal_numpy(framework):
    x, gate, up, down = values(3, 4), values(6, 4), values(6, 4), values(4, 6)
    params = {
        name: part(framework, weight=each)
        for name, each in (("gate", gate), ("up", up), ("down", down))
    }
    found = layer(framework, "mlp", "gated_mlp")(params, framework.array(x), "silu")
    close(framework, found, (silu(x @ gate.T) * (x @ up.T)) @ down.T)
    found = layer(framework, "mlp", "mlp")(params, framework.array(x), "gelu_tanh")
    close(framework, found, gelu_tanh(x @ up.T) @ down.T)
    found = layer(framework, "mlp", "mlp")(params, framework.array(x), "relu2")
    close(framework, found, np.maximum(x @ up.T, 0) ** 2 @ down.T)


def swiglu_oai(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


ROUTERS = {
    "softmax": ExpertsConfig(8, 3, 6),
    "renormalized": ExpertsConfig(8, 3, 6, renormalizes=True, scale=2.5),
    "of the chosen": ExpertsConfig(8, 3, 6, "softmax_chosen", router_bias=True),
    "best groups": ExpertsConfig(8, 2, 6, groups=4, groups_per_token=2),
    "best pairs": ExpertsConfig(
        *(8, 2, 6, "sigmoid"),
        groups=2,
        group_score="best_two",
        correction=True,
    ),
}


def routed(config: ExpertsConfig, logits: np.ndarray, correction: np.ndarray) -> np.ndarray:
    """The weight of every expert for one token, (E,); 0: the token did not choose the expert."""
    scores = 1 / (1 + np.exp(-logits)) if config.scoring == "sigmoid" else np.exp(logits)
    if config.scoring == "softmax":
        scores /= scores.sum()
    ranked = scores + correction if config.correction else scores
    groups = np.sort(ranked.reshape(config.groups, -1))
    best = groups[:, -1 if config.group_score == "best" else -2 :].sum(axis=1)
    kept = np.argsort(-best)[: config.groups_per_token]
    is_kept = np.isin(np.arange(config.count) // (config.count // config.groups), kept)
    chosen = np.argsort(-np.where(is_kept, ranked, -np.inf))[: config.per_token]
    weights = np.zeros_like(scores)
    weights[chosen] = scores[chosen]
    if config.renormalizes or config.scoring == "softmax_chosen":
        weights /= weights.sum()
    return weights * config.scale


@pytest.mark.parametrize("name", ROUTERS)
def test_the_moe_router_selects_and_weights_experts(framework, name):
    config, x = ROUTERS[name], values(30, 4)
    weight, bias, correction = values(8, 4), values(8), values(8) * 0.2
    router = {"weight": weight} | ({"bias": bias} if config.router_bias else {})
    params = {"router": part(framework, **router), "correction": framework.array(correction)}
    weights, chosen = layer(framework, "experts", "route")(params, config, framework.array(x))
    found = np.zeros((30, 8), np.float32)
    np.put_along_axis(found, framework.numpy(chosen), framework.numpy(weights), axis=1)
    logits = x @ weight.T + (bias if config.router_bias else 0)
    np.testing.assert_allclose(
        found, [routed(config, each, correction) for each in logits], rtol=1e-4, atol=1e-6
    )


def test_of_equally_scored_experts_the_first_is_selected(framework):
    params = {"router": part(framework, weight=np.zeros((4, 2), np.float32))}
    config = ExpertsConfig(4, 2, 6)
    weights, chosen = layer(framework, "experts", "route")(
        params, config, framework.array(values(3, 2))
    )
    assert framework.numpy(chosen).tolist() == [[0, 1]] * 3
    close(framework, weights, np.full((3, 2), 0.25))


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_an_moe_layer_sums_selected_and_shared_experts(framework, activation):
    """With biases, with a gate on the shared expert, and with experts that no token chooses."""
    config = ExpertsConfig(8, 2, 6, bias=True, shared_size=3, shared_gate=True)
    x, router = values(3, 4) * 4, values(8, 4)
    sizes = {"gate": (6, 4), "up": (6, 4), "down": (4, 6)}
    experts = {name: (values(8, *size), values(8, size[0])) for name, size in sizes.items()}
    shared = {
        "gate": values(3, 4),
        "up": values(3, 4),
        "down": values(4, 3),
        "router": values(1, 4),
    }
    params = {
        "experts": {"router": part(framework, weight=router)}
        | {name: part(framework, weight=each[0], bias=each[1]) for name, each in experts.items()},
        "shared": {name: part(framework, weight=each) for name, each in shared.items()},
    }
    found = layer(framework, "experts", "mixture")(params, config, activation, framework.array(x))

    def act(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return silu(gate) * up if activation == "silu" else swiglu_oai(gate, up)

    def projected(name: str, expert: int, token: np.ndarray) -> np.ndarray:
        weight, bias = experts[name]
        return weight[expert] @ token + bias[expert]

    for token, own in zip(x, framework.numpy(found), strict=True):
        expected = act(shared["gate"] @ token, shared["up"] @ token) @ shared["down"].T
        expected = expected / (1 + np.exp(-shared["router"] @ token))
        for expert, weight in enumerate(routed(config, router @ token, np.zeros(8))):
            inner = act(projected("gate", expert, token), projected("up", expert, token))
            expected = expected + weight * projected("down", expert, inner)
        np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("half", [2, 4], ids=["partly", "wholly"])
def test_rope_rotates_heads_by_their_positions(framework, half):
    x, angles = values(3, 2, 8), values(3, half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    expected = (first * cos - second * sin, second * cos + first * sin, rest)
    turn = framework.rotation(np.cos(angles), np.sin(angles))
    found = layer(framework, "rotary", "rotate")(framework.array(x), turn)
    close(framework, found, np.concatenate(expected, axis=-1))


@pytest.mark.parametrize("window", [None, 1, 3])
def test_attention_is_causal_with_grouped_heads_and_windows(framework, window):
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
    found = attend(*map(framework.array, (q, k, v)), Scoring(0.3, window), framework.per_head())
    close(framework, found, expected)


@pytest.mark.parametrize("qk_norm", [None, "head", "whole"])
def test_q_k_v_are_split_normalized_and_rotated(framework, qk_norm):
    x, angles = values(3, 6), values(3, 2)
    weights = {"q": values(8, 6), "k": values(4, 6), "v": values(4, 6)}
    sizes = {"q_norm": 8, "k_norm": 4} if qk_norm == "whole" else {"q_norm": 4, "k_norm": 4}
    norms = {name: values(size) for name, size in sizes.items()}
    params = {name: part(framework, weight=each) for name, each in (weights | norms).items()}
    turn = framework.rotation(np.cos(angles), np.sin(angles))
    config = SimpleNamespace(latent=None, head_dim=4, qk_norm=qk_norm, norm_eps=EPS)
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
    from engine.jax.execution.buckets import padded_rows
    from engine.tinygrad.execution.runner import padded_size

    assert [padded_rows(count) for count in (1, 2, 3, 8, 9, 17)] == [2, 2, 8, 8, 16, 32]
    assert [padded_size(count) for count in (1, 2, 8, 9, 32, 33)] == [1, 8, 8, 32, 32, 128]


def test_attention_items_cover_each_row_and_single_queries_come_first():
    from engine.jax.execution.buckets import attention_items

    counts = np.array([5, 1, 4], np.int32)
    query_start = np.array([0, 5, 6, 10], np.int32)
    tokens, lengths, rows = attention_items(query_start, counts, 4)
    assert (tokens.tolist(), lengths.tolist(), rows.tolist()) == (
        *([4, 5, 0, 6], [1, 1, 4, 4]),
        [0, 1, 0, 2],
    )
    singles = attention_items(np.arange(4, dtype=np.int32), np.ones(3, np.int32), 1)
    assert [each.tolist() for each in singles] == [[0, 1, 2], [1, 1, 1], [0, 1, 2]]


@pytest.mark.parametrize("sizes", [(40, 0, 9, 1), (0, 0, 3, 0)])
def test_looped_and_ragged_experts_in_jax_equal_each_other(sizes):
    """A run of tokens that ends at an expert's last token reaches into the next expert's tokens."""
    import jax.numpy as jnp

    from engine.jax.layers.experts import (
        looped_experts,
        ragged_experts,
    )

    x, of_token = values(sum(sizes), 4), np.repeat(np.arange(4), sizes)
    gate, up, down = values(4, 6, 4), values(4, 6, 4), values(4, 4, 6)
    params = {
        name: {"weight": jnp.array(each)}
        for name, each in (("gate", gate), ("up", up), ("down", down))
    }
    inner = [silu(gate[e] @ token) * (up[e] @ token) for e, token in zip(of_token, x, strict=True)]
    expected = [down[e] @ each for e, each in zip(of_token, inner, strict=True)]
    for run in (looped_experts, ragged_experts):
        found = run(params, "silu", jnp.array(x), jnp.array(sizes))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
