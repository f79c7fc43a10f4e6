"""The ops of layers that keep a state for each sequence: attributes, shapes, numpy references,
examples and costs.

An op reads the result of the layer's input projection and returns the input of the output
projection. The state of a layer is an array (slots, floats). It begins with the last inputs of the
convolution, (window - 1, channels). For each head, a matrix (state size, head dim) follows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import ModelConfig
from engine.architectures.hybrids.states import MixerSizes, StateConfig
from engine.ir.types import (
    Array,
    Cost,
    Counts,
    Examples,
    OpExample,
    ShapeError,
    Value,
)

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
L2_EPS = 1e-6  # Gated DeltaNet divides queries and keys by sqrt(sum of squares + this)


class Recurrence(msgspec.Struct, frozen=True):
    """The settings of a layer that keeps a state."""

    mixer: Literal["conv", "mamba2", "delta"]
    layer: int  # index of the layer among those that keep a state
    hidden_size: int
    state: StateConfig
    eps: float  # of the norm in Mamba-2 and Gated DeltaNet

    @property
    def sizes(self) -> MixerSizes:
        return self.state.sizes(self.mixer, self.hidden_size)

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights of the op, in its order, by their names in the layer."""
        state, sizes = self.state, self.sizes
        shapes: dict[str, tuple[int, ...]] = {"conv.weight": (sizes.channels, state.conv_size)}
        if state.conv_bias:
            shapes["conv.bias"] = (sizes.channels,)
        if self.mixer != "conv":
            shapes |= {"dt_bias": (state.heads,), "decay": (state.heads,)}
        if self.mixer == "mamba2":
            shapes |= {"skip": (state.heads,), "norm.weight": (sizes.out,)}
        elif self.mixer == "delta":
            shapes["norm.weight"] = (state.head_dim,)
        return shapes


def empty_states(config: ModelConfig, slots: int) -> tuple[F32, ...]:
    """An array of states for each layer that keeps one."""
    mixers = [config.layer(index).mixer for index in config.state_layers]
    state, hidden = config.state, config.hidden_size
    sizes = [state.sizes(mixer, hidden).state for mixer in mixers] if state else []
    return tuple(np.zeros((slots, size), np.float32) for size in sizes)


def infer(attributes: Recurrence, inputs: Sequence[Value], weights: Sequence[Value]) -> Value:
    if len(inputs) != 5:
        raise ShapeError(f"takes 5 inputs, found {len(inputs)}")
    source, state, positions, row_of, slots = inputs
    sizes, rows = attributes.sizes, source.shape[0]
    if source != Value((rows, sizes.projected)):
        raise ShapeError(f"the projection must have {sizes.projected} columns, found {source}")
    if state != Value((state.shape[0], sizes.state)):
        raise ShapeError(f"a state must have {sizes.state} values, found {state}")
    for each, what in ((positions, "positions"), (row_of, "sequences")):
        if each != Value((rows,), "i32"):
            raise ShapeError(f"{what} {each} are not one for each row of {source}")
    if slots.dtype != "i32" or len(slots.shape) != 1:
        raise ShapeError(f"slots must be integers, found {slots}")
    wanted = attributes.weight_shapes
    if [each.shape for each in weights] != list(wanted.values()):
        raise ShapeError(f"the weights must be {wanted}, found {list(map(str, weights))}")
    return Value((rows, sizes.out))


def compute(attributes: Recurrence, inputs: Sequence[Array], weights: Sequence[Array]) -> Array:
    """Runs the layer over the tokens of each sequence in the order of their positions. Updates the
    states in place. A sequence that begins at position 0 begins with a state of zeros.
    """
    x, states, positions, row_of, slots = inputs
    sizes = attributes.sizes
    named = dict(zip(attributes.weight_shapes, weights, strict=True))
    out = np.empty((len(x), sizes.out), np.float32)
    for row in np.unique(row_of):
        tokens = np.flatnonzero(row_of == row)
        tokens = tokens[np.argsort(positions[tokens], kind="stable")]
        state = states[slots[row]]
        if positions[tokens[0]] == 0:
            state[:] = 0
        out[tokens] = _MIXERS[attributes.mixer](attributes, x[tokens], state, named)
    return out


def cost(
    attributes: Recurrence, inputs: Sequence[Value], weights: Sequence[Value], counts: Counts
) -> Cost:
    sizes, state = attributes.sizes, attributes.state
    per_token = 2 * sizes.channels * state.conv_size + 6 * sizes.out * state.state_size
    moved = counts.tokens * (sizes.projected + sizes.out) + 2 * counts.sequences * sizes.state
    return Cost(counts.tokens * per_token, 4 * (moved + sum(map(counts.size, weights))))


def _silu(x: F64) -> F64:
    product: F64 = x / (1 + np.exp(-x))
    return product


def _softplus(x: F64) -> F64:
    wide: F64 = np.logaddexp(0, x)
    return wide


def _convolved(attributes: Recurrence, x: F32, state: F32, weights: dict[str, F32]) -> F64:
    """The causal convolution of each channel: inputs (T, C) -> (T, C)."""
    window, channels = attributes.state.conv_size - 1, attributes.sizes.channels
    last = state[: window * channels].reshape(window, channels)
    padded = np.concatenate((last, x)).astype(np.float64)
    out = np.zeros(x.shape)
    for place in range(window + 1):
        out += padded[place : place + len(x)] * weights["conv.weight"][:, place]
    last[:] = padded[len(x) :]
    return out + weights["conv.bias"] if "conv.bias" in weights else out


def _short_conv(attributes: Recurrence, x: F32, state: F32, weights: dict[str, F32]) -> F32:
    before, after, values = np.split(x, 3, axis=1)
    out = after * _convolved(attributes, before * values, state, weights)
    return out.astype(np.float32)


def _memory(attributes: Recurrence, state: F32) -> F32:
    """The matrices of all heads, (heads, state size, head dim)."""
    settings = attributes.state
    start = (settings.conv_size - 1) * attributes.sizes.channels
    return state[start:].reshape(settings.heads, settings.state_size, settings.head_dim)


def _mamba2(attributes: Recurrence, x: F32, state: F32, weights: dict[str, F32]) -> F32:
    settings, sizes = attributes.state, attributes.sizes
    heads, size, width = settings.heads, settings.head_dim, settings.state_size
    gate, mixed, steps = np.split(x, (sizes.out, sizes.out + sizes.channels), axis=1)
    convolved = _silu(_convolved(attributes, mixed, state, weights))
    shared = settings.groups * width
    values, b, c = np.split(convolved, (sizes.out, sizes.out + shared), axis=1)
    values = values.reshape(-1, heads, size)
    b, c = (
        np.repeat(each.reshape(len(x), -1, width), heads // settings.groups, axis=1)
        for each in (b, c)
    )
    dt = _softplus(steps.astype(np.float64) + weights["dt_bias"])  # (T, heads)
    memory, out = _memory(attributes, state), np.empty(values.shape)
    held = memory.astype(np.float64)
    for t in range(len(x)):
        held *= np.exp(dt[t] * weights["decay"])[:, None, None]
        held += (dt[t][:, None] * b[t])[:, :, None] * values[t][:, None]
        out[t] = np.einsum("hnp,hn->hp", held, c[t]) + weights["skip"][:, None] * values[t]
    memory[:] = held
    gated = out.reshape(len(x), -1) * _silu(gate.astype(np.float64))
    parts = gated.reshape(len(x), settings.norm_groups, -1)
    parts = parts / np.sqrt(np.mean(parts**2, axis=-1, keepdims=True) + attributes.eps)
    normed: F32 = (parts.reshape(gated.shape) * weights["norm.weight"]).astype(np.float32)
    return normed


def _delta(attributes: Recurrence, x: F32, state: F32, weights: dict[str, F32]) -> F32:
    settings, sizes = attributes.state, attributes.sizes
    heads, size, width = settings.heads, settings.head_dim, settings.state_size
    ends = np.cumsum((sizes.channels, sizes.out, heads))
    mixed, gate, strength, steps = np.split(x.astype(np.float64), ends, axis=1)
    convolved = _silu(_convolved(attributes, mixed.astype(np.float32), state, weights))
    shared = settings.groups * width
    q, k, v = np.split(convolved, (shared, 2 * shared), axis=1)
    q, k = (
        np.repeat(_unit(each.reshape(len(x), -1, width)), heads // settings.groups, axis=1)
        for each in (q, k)
    )
    v, q = v.reshape(-1, heads, size), q / np.sqrt(width)
    beta = 1 / (1 + np.exp(-strength))
    decay = np.exp(weights["decay"] * _softplus(steps + weights["dt_bias"]))
    memory, out = _memory(attributes, state), np.empty(v.shape)
    held = memory.astype(np.float64)
    for t in range(len(x)):
        held *= decay[t][:, None, None]
        change = (v[t] - np.einsum("hnp,hn->hp", held, k[t])) * beta[t][:, None]
        held += k[t][:, :, None] * change[:, None]
        out[t] = np.einsum("hnp,hn->hp", held, q[t])
    memory[:] = held
    normed = out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + attributes.eps)
    gated = normed * weights["norm.weight"] * _silu(gate.reshape(out.shape))
    flat: F32 = gated.reshape(len(x), -1).astype(np.float32)
    return flat


def _unit(x: F64) -> F64:
    unit: F64 = x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + L2_EPS)
    return unit


_MIXERS: dict[str, Callable[[Recurrence, F32, F32, dict[str, F32]], F32]] = {
    "conv": _short_conv,
    "mamba2": _mamba2,
    "delta": _delta,
}
# The names of the ops, by mixer.
OP_NAMES = {"conv": "short_conv", "mamba2": "mamba2", "delta": "gated_delta"}
_EXAMPLES: dict[str, tuple[StateConfig, ...]] = {
    "conv": (StateConfig(3), StateConfig(4, conv_bias=True)),
    "mamba2": (
        StateConfig(4, True, heads=6, head_dim=8, groups=2, state_size=16, norm_groups=2),
        StateConfig(3, heads=3, head_dim=20, groups=1, state_size=12),
    ),
    "delta": (
        StateConfig(4, heads=6, head_dim=8, groups=2, state_size=16),
        StateConfig(3, heads=3, head_dim=20, groups=3, state_size=12),
    ),
}


def examples(
    mixer: Literal["conv", "mamba2", "delta"],
) -> Examples:
    """Batches of three sequences: a decode token, a whole prompt, and a later chunk of a prompt. In
    a native batch, the decode tokens of a sequence may come before its prompt.
    """

    def generate(rng: "np.random.Generator") -> Iterator[OpExample]:
        for hidden_size, settings in zip((24, 40), _EXAMPLES[mixer], strict=True):
            attributes = Recurrence(mixer, 0, hidden_size, settings, 1e-5)
            positions = np.concatenate(([40], np.arange(7), np.arange(20, 33))).astype(np.int32)
            row_of = np.repeat(np.arange(3, dtype=np.int32), (1, 7, 13))
            order = np.roll(np.arange(len(positions)), 3)
            sizes = attributes.sizes
            x = rng.normal(0, 1, (len(positions), sizes.projected)).astype(np.float32)
            state = rng.normal(0, 1, (4, sizes.state)).astype(np.float32)
            slots = np.array([2, 0, 3], np.int32)
            weights = []
            for name, shape in attributes.weight_shapes.items():
                values = rng.normal(0, 0.5, shape)
                weights.append((-np.exp(values) if name == "decay" else values).astype(np.float32))
            inputs = (x, state, positions[order], row_of[order], slots)
            yield OpExample(attributes, inputs, tuple(weights))

    return generate
