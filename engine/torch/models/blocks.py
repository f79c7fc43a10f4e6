"""The layers of a decoder. They differ in what their norms normalize, and in whether attention and
MLP follow each other.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from engine.architectures.base import ModelConfig
from engine.torch.kernels.skinny import is_few
from engine.torch.layers.attention import (
    AnyAttention,
    Attention,
    Step,
    make_attention,
)
from engine.torch.layers.experts import Experts, SharedExpert
from engine.torch.layers.linear import can_add
from engine.torch.layers.mlp import MLP, GatedMLP
from engine.torch.layers.norm import LayerNorm, RMSNorm
from engine.torch.layers.quantized_linear import Fp8Linear, Fp8RMSNorm
from engine.torch.layers.recurrent import Recurrent

Norm = RMSNorm | LayerNorm


def make_norm(config: ModelConfig) -> Norm:
    if config.norm == "rms":
        return RMSNorm(config.hidden_size, config.norm_eps)
    return LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias)


class Block(nn.Module, ABC):
    """One layer: attention and MLP. Both add to the residual stream. In the place of attention,
    there may be a mixer that keeps a state. The MLP may be a mixture of experts.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = make_norm(config)
        self.attends = config.layer(layer).mixer == "attention"
        if self.attends:
            self.attn: AnyAttention = make_attention(config, layer)
        else:
            self.mixer = Recurrent(config, layer)
        self.mlp: GatedMLP | MLP | None = None
        self.experts: Experts | None = None
        self.shared: SharedExpert | None = None
        if config.layer(layer).experts:
            assert config.experts is not None, config
            self.experts = Experts(config, config.experts)
            if config.experts.shared_size:
                self.shared = SharedExpert(config, config.experts)
        else:
            self.mlp = GatedMLP(config) if config.gated_mlp else MLP(config)
        self.multiplier = config.residual_multiplier

    @property
    def mix(self) -> AnyAttention | Recurrent:
        return self.attn if self.attends else self.mixer

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.halves(x, step)[2]

    def halves(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output of attention, the output of the MLP, and the residual stream after the
        layer.
        """
        read = self._attention_input(x)
        attended = self.mix(read, step)
        return attended, *self._finish(x, read, attended)

    def parts(self, x: Tensor, delta: Tensor | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """Returns the residual stream after this layer, and a delta that still has to be added to
        it. The next layer's norm adds the delta in the same kernel. If the matmuls already add to
        the residual stream, the delta is None, and x may be modified in place.
        """
        assert delta is None, "all blocks are alike"
        return self.halves(x, step)[2], None

    def last(
        self, x: Tensor, delta: Tensor | None, step: Step, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer as the last one of the model. Returns the residual stream after it, only
        for the tokens `rows`, (R, D), because no other tokens are needed. Also returns the
        attention output of all tokens, (T, N H), in which NaN reveals that a token's keys or values
        in the cache are NaN.
        """
        assert delta is None, "all blocks are alike"
        read = self._attention_input(x)
        attended = self.mix.attended(read, step)
        x, read, chosen = (each.index_select(0, rows) for each in (x, read, attended))
        if not len(rows):
            return x, attended
        return self._finish(x, read, self.mix.o(chosen))[1], attended

    def feed(self, x: Tensor) -> Tensor:
        """The MLP, or the mixture of experts."""
        if self.experts is None:
            assert self.mlp is not None
            return self.mlp(x)
        y = self.experts(x)
        return y if self.shared is None else y + self.shared(x)

    @abstractmethod
    def _attention_input(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _finish(self, x: Tensor, read: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Runs what follows attention. x is the residual stream before the layer, `read` the input
        of attention. Returns the output of the MLP, and the residual stream after the layer.
        """

    def _scaled(self, half: Tensor) -> Tensor:
        return half if self.multiplier == 1 else half * self.multiplier


class InputNormBlock(Block):
    """A pre-norm block: attention and MLP read a normalized copy of the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.mlp_norm = make_norm(config)

    def _attention_input(self, x: Tensor) -> Tensor:
        return self.attn_norm(x)

    def _finish(self, x: Tensor, read: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        normed, x = self.mlp_norm.add(self._scaled(attended), x)
        fed = self.feed(normed)
        return fed, x + self._scaled(fed)

    def parts(self, x: Tensor, delta: Tensor | None, step: Step) -> tuple[Tensor, Tensor | None]:
        attn, attn_norm, mlp, mlp_norm = self.mix, self.attn_norm, self.mlp, self.mlp_norm
        # After a mixture of experts, there is a delta. Then the fused paths can't be used.
        if delta is None and self._is_few(x):
            assert isinstance(attn_norm, RMSNorm) and isinstance(mlp_norm, RMSNorm)
            assert isinstance(mlp, GatedMLP)
            return mlp.fused(attn.fused(x, attn_norm, step), mlp_norm), None
        if delta is None and self._can_add(x):
            return self._added(x, attn.attended(attn_norm(x), step)), None
        normed, x = self._normed(x, delta)
        normed, x = mlp_norm.add(self._scaled(attn(normed, step)), x)
        return x, self._scaled(self.feed(normed))

    def last(
        self, x: Tensor, delta: Tensor | None, step: Step, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed, x = self._normed(x, delta)
        attended = self.mix.attended(normed, step)
        x, chosen = x.index_select(0, rows), attended.index_select(0, rows)
        if not len(rows):
            return x, attended
        if delta is None and self._can_add(x) and not self._is_few(x):
            return self._added(x, chosen), attended
        if self._is_few(x):
            assert isinstance(self.mlp, GatedMLP) and isinstance(self.mlp_norm, RMSNorm)
            return self.mlp.fused(self.mix.o.fused(chosen, residual=x), self.mlp_norm), attended
        return self._finish(x, normed, self.mix.o(chosen))[1], attended

    def _can_add(self, x: Tensor) -> bool:
        """Whether the matmuls after attention can add to the residual stream themselves."""
        return self.mlp is not None and can_add(self.mix.o, x) and can_add(self.mlp.down, x)

    def _added(self, x: Tensor, attended: Tensor) -> Tensor:
        """Runs what follows attention, if `_can_add`. May modify x in place."""
        assert self.mlp is not None
        x = self.mix.o.add_to(x, attended, self.multiplier)
        return self.mlp.down.add_to(x, self.mlp.activated(self.mlp_norm(x)), self.multiplier)

    def _is_few(self, x: Tensor) -> bool:
        """Whether there are so few rows that attention and MLP use fused kernels, which also add to
        the residual stream. These kernels have no layer norm, no multiplier, and no experts.
        """
        return (
            is_few(x)
            and not self.mix.o.is_invariant
            and isinstance(self.mlp, GatedMLP)
            and isinstance(self.attn_norm, RMSNorm)
            and self.multiplier == 1
            and (len(x) == 1 or not isinstance(self.attn_norm, Fp8RMSNorm))
        )

    def quantize_inputs(self) -> None:
        """Lets norms and the gated activation quantize their results, if all layers that read these
        results have float8 weights. Otherwise each layer quantizes its own input.
        """
        mlp = self.mlp
        if not isinstance(self.attn_norm, RMSNorm) or not isinstance(self.mlp_norm, RMSNorm):
            return
        if not self.attends or not isinstance(mlp, GatedMLP):
            return
        gate = self.attn.gate if isinstance(self.attn, Attention) else None
        layers = (self.attn.qkv, gate, mlp.gate_up, mlp.down)
        if not all(layer is None or isinstance(layer, Fp8Linear) for layer in layers):
            return
        self.attn_norm, self.mlp_norm = Fp8RMSNorm(self.attn_norm), Fp8RMSNorm(self.mlp_norm)
        assert isinstance(mlp.gate_up, Fp8Linear)
        mlp.gate_up.feeds_fp8 = True

    def _normed(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds the delta of the previous layer. Returns the normalized input of attention, and the
        residual stream.
        """
        return (self.attn_norm(x), x) if delta is None else self.attn_norm.add(delta, x)


class HalfBlock(nn.Module):
    """A layer that has either a mixer or an MLP, with a norm before it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        kind = config.layer(layer)
        self.multiplier = config.residual_multiplier
        self.kind = kind.mixer
        if kind.mixer == "none":
            self.mlp_norm = make_norm(config)
            self.mlp = GatedMLP(config) if config.gated_mlp else MLP(config)
            return
        self.attn_norm = make_norm(config)
        if kind.mixer == "attention":
            self.attn = make_attention(config, layer)
        else:
            self.mixer = Recurrent(config, layer)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.halves(x, step)[2]

    def halves(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """See `Block.halves`. The output of the half that the layer lacks is zero."""
        half = self.mlp(self.mlp_norm(x)) if self.kind == "none" else self._mixed(x, step)
        total, zero = x + half * self.multiplier, torch.zeros_like(x)
        return (zero, half, total) if self.kind == "none" else (half, zero, total)

    def parts(self, x: Tensor, delta: Tensor | None, step: Step) -> tuple[Tensor, Tensor | None]:
        return self.forward(x if delta is None else x + delta, step), None

    def last(
        self, x: Tensor, delta: Tensor | None, step: Step, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = x if delta is None else x + delta
        if self.kind != "none":
            x = self.forward(x, step)
            return x.index_select(0, rows), x
        return self.forward(x.index_select(0, rows), step), x

    def _mixed(self, x: Tensor, step: Step) -> Tensor:
        mix = self.attn if self.kind == "attention" else self.mixer
        return mix(self.attn_norm(x), step)


class OutputNormBlock(Block):
    """Attention and MLP read the residual stream itself. Their outputs are normalized before they
    are added to it.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.mlp_norm = make_norm(config)

    def _attention_input(self, x: Tensor) -> Tensor:
        return x

    def _finish(self, x: Tensor, read: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self._scaled(self.attn_norm(attended))
        fed = self.feed(x)
        return fed, x + self._scaled(self.mlp_norm(fed))


class BothNormBlock(Block):
    """The inputs and the outputs of attention and MLP are normalized."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.mlp_norm = make_norm(config)
        self.attn_out_norm, self.mlp_out_norm = make_norm(config), make_norm(config)

    def _attention_input(self, x: Tensor) -> Tensor:
        return self.attn_norm(x)

    def _finish(self, x: Tensor, read: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        normed, x = self.mlp_norm.add(self._scaled(self.attn_out_norm(attended)), x)
        fed = self.feed(normed)
        return fed, x + self._scaled(self.mlp_out_norm(fed))


class ParallelBlock(Block):
    """Attention and MLP both read the residual stream before the layer, normalized by one norm or
    by a norm each.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.mlp_norm = make_norm(config) if config.parallel == "own" else None

    def _attention_input(self, x: Tensor) -> Tensor:
        return self.attn_norm(x)

    def _finish(self, x: Tensor, read: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        fed = self.feed(read if self.mlp_norm is None else self.mlp_norm(x))
        return fed, x + self._scaled(attended) + self._scaled(fed)


_BLOCKS: dict[str, type[Block]] = {
    "input": InputNormBlock,
    "output": OutputNormBlock,
    "both": BothNormBlock,
}


def make_block(config: ModelConfig, layer: int) -> Block | HalfBlock:
    kind = config.layer(layer)
    if kind.mixer == "none" or not kind.mlp:
        assert config.norm_placement == "input", "a layer with one half normalizes its input"
        return HalfBlock(config, layer)
    if config.parallel is None:
        return _BLOCKS[config.norm_placement](config, layer)
    assert config.norm_placement == "input", "a parallel block normalizes inputs"
    return ParallelBlock(config, layer)
