"""Layers that keep a state for each sequence, in the place of attention: short convolutions,
Mamba-2 and Gated DeltaNet. The `Step` object has the states.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.architectures.base import ModelConfig
from engine.torch.layers.linear import Linear
from engine.torch.layers.norm import RMSNorm
from engine.torch.layers.scans import (
    Rows,
    convolve,
    delta_rule,
    gated_norm,
    mamba2,
)


@dataclass(frozen=True, slots=True)
class LayerState:
    """The states of one layer, by slot. None: all rows of the step begin with zeros, and their
    states are not kept.
    """

    conv: Tensor | None = None  # (slots, window - 1, channels) the last inputs of the convolution
    matrix: Tensor | None = None  # (slots, heads, state size, head dim) float32


class RecurrentStep(Protocol):
    """What a layer needs to know about a forward pass."""

    @property
    def rows(self) -> Rows | None:
        """The rows of the step. None only if no layer keeps a state."""
        ...

    def state(self, layer: int) -> LayerState:
        """The states of a layer. `layer` counts only layers that keep a state."""
        ...


class Convolution(nn.Module):
    def __init__(self, channels: int, window: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, window))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x: Tensor, rows: Rows, held: Tensor | None) -> Tensor:
        return convolve(x, self.weight, self.bias, rows, held)


class Recurrent(nn.Module):
    """A mixer that keeps a state. It has the methods of `Attention`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        state, mixer = config.state, config.layer(layer).mixer
        assert state is not None, config
        self.settings, self.kind = state, mixer
        self.sizes = sizes = state.sizes(mixer, config.hidden_size)
        self.layer = config.state_layers.index(layer)
        parts = tuple(state.parts(mixer, config.hidden_size).items())
        self.inputs = Linear(config.hidden_size, sizes.projected, state.proj_bias, parts)
        self.conv = Convolution(sizes.channels, state.conv_size, state.conv_bias)
        self.o = Linear(sizes.out, config.hidden_size, state.proj_bias)
        if mixer == "conv":
            return
        # Their errors grow with the length of a text, so they are always float32.
        self.dt_bias = nn.Parameter(torch.empty(state.heads, dtype=torch.float32))
        self.decay = nn.Parameter(torch.empty(state.heads, dtype=torch.float32))
        if mixer == "mamba2":
            self.skip = nn.Parameter(torch.empty(state.heads, dtype=torch.float32))
        self.norm = RMSNorm(sizes.out if mixer == "mamba2" else state.head_dim, config.norm_eps)

    def forward(self, x: Tensor, step: RecurrentStep) -> Tensor:
        return self.o(self.attended(x, step))

    def attended(self, x: Tensor, step: RecurrentStep) -> Tensor:
        """The input of the output projection, (T, out)."""
        return self._mixed(self.inputs(x), step)

    def fused(self, x: Tensor, norm: RMSNorm, step: RecurrentStep) -> Tensor:
        """x + layer(norm(x)). It uses fused kernels, which are fast for few tokens."""
        return self.o.fused(self._mixed(self.inputs.fused(x, norm=norm), step), residual=x)

    def _mixed(self, projected: Tensor, step: RecurrentStep) -> Tensor:
        rows, state = step.rows, step.state(self.layer)
        assert rows is not None, self.kind
        mix = {"conv": self._short_conv, "mamba2": self._mamba2, "delta": self._delta}
        return mix[self.kind](projected, rows, state).to(projected.dtype)

    def _short_conv(self, x: Tensor, rows: Rows, state: LayerState) -> Tensor:
        before, after, values = x.chunk(3, dim=-1)
        return after * self.conv(before * values, rows, state.conv)

    def _mamba2(self, x: Tensor, rows: Rows, state: LayerState) -> Tensor:
        settings, sizes = self.settings, self.sizes
        gate, mixed, steps = x.split((sizes.out, sizes.channels, settings.heads), dim=-1)
        shared = settings.groups * settings.state_size
        mixed = F.silu(self.conv(mixed, rows, state.conv))
        values, b, c = mixed.split((sizes.out, shared, shared), dim=-1)
        values = values.unflatten(-1, (settings.heads, -1))
        b, c = (each.unflatten(-1, (settings.groups, -1)) for each in (b, c))
        dt = F.softplus(steps.float() + self.dt_bias)
        out = mamba2(values, b, c, dt, self.decay, rows, state.matrix)
        out = (out + self.skip[:, None] * values).flatten(-2)
        return gated_norm(out, gate, self.norm.weight, self.norm.eps, settings.norm_groups)

    def _delta(self, x: Tensor, rows: Rows, state: LayerState) -> Tensor:
        settings, sizes, heads = self.settings, self.sizes, self.settings.heads
        mixed, gate, beta, steps = x.split((sizes.channels, sizes.out, heads, heads), dim=-1)
        shared = settings.groups * settings.state_size
        mixed = F.silu(self.conv(mixed, rows, state.conv))
        q, k, v = mixed.split((shared, shared, sizes.out), dim=-1)
        q, k = (each.unflatten(-1, (settings.groups, -1)) for each in (q, k))
        log_decay = self.decay * F.softplus(steps.float() + self.dt_bias)
        v = v.unflatten(-1, (heads, -1))
        out = delta_rule(q, k, v, log_decay, beta.float().sigmoid(), rows, state.matrix)
        normed = F.rms_norm(out, self.norm.weight.shape, self.norm.weight.float(), self.norm.eps)
        return normed.flatten(-2) * F.silu(gate.float())
