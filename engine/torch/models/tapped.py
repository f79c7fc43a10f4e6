"""Runs a decoder with taps. A layer with taps inside of it runs matmuls, norms and sums separately,
so that every site has a value of its own. All other layers run as always.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.architectures.sites import Site
from engine.runtime.interp.groups import GroupShape
from engine.runtime.interp.taps import (
    ADD,
    CAPTURE,
    CLAMP,
    EXTRA_COLUMNS,
    PROJECT_OUT,
    SCALE,
)
from engine.torch.kernels.activation import activate, gated
from engine.torch.layers.attention import Attention, Step
from engine.torch.layers.mlp import MLP, GatedMLP
from engine.torch.models.base import Decoder
from engine.torch.models.blocks import (
    Block,
    BothNormBlock,
    HalfBlock,
    InputNormBlock,
    OutputNormBlock,
    ParallelBlock,
)
from engine.torch.models.gpt2 import GPT2

_ENDS = ("resid_pre", "resid_post")  # the residual stream before and after a layer


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """A `TapGroup` on the device. CUDA graphs read these tensors, so they stay in place."""

    shape: GroupShape
    tokens: Tensor  # (size,) int64
    scales: Tensor  # (size, 1)
    vectors: Tensor
    decoders: Tensor
    captured: Tensor  # of CAPTURE: (size, W) where the values go

    def apply(self, x: Tensor) -> Tensor:
        """Applies the taps to x (T, W), which is not modified."""
        kind, width = self.shape.kind, x.shape[1]
        if kind == CAPTURE:
            self.captured[:, :width].copy_(x.index_select(0, self.tokens))
            return x
        vectors = self.vectors[:, :width].to(x.dtype)
        scales = self.scales.to(x.dtype)
        if kind == ADD:
            return x.index_add(0, self.tokens, scales * vectors)
        old = x.index_select(0, self.tokens)
        if kind == SCALE:
            new = scales * old
        elif kind == PROJECT_OUT:
            new = old - scales * (old * vectors).sum(1, keepdim=True) * vectors
        elif kind == CLAMP:
            bias, threshold = self.vectors[:, -EXTRA_COLUMNS, None], self.vectors[:, -1:]
            feature = (old.float() * self.vectors[:, :width]).sum(1, keepdim=True) + bias
            feature = torch.where(feature > threshold, feature, 0.0)
            new = old + ((self.scales - feature) * self.decoders[:, :width]).to(x.dtype)
        else:
            new = scales * vectors
        return x.index_copy(0, self.tokens, new)


class TensorTaps:
    """The taps of a step, by layer and part."""

    def __init__(self, groups: Sequence[TensorGroup], sites: tuple[Site, ...]) -> None:
        self.groups = groups
        self._at: dict[tuple[int, str], list[TensorGroup]] = {}
        for group in groups:
            site = sites[group.shape.site]
            self._at.setdefault((site.layer, site.part), []).append(group)
        self._layers = {layer for layer, part in self._at if part not in _ENDS}

    def has_inside(self, layer: int) -> bool:
        """Whether taps need values that only exist inside of this layer."""
        return layer in self._layers

    def has(self, layer: int, *parts: str) -> bool:
        return any((layer, part) in self._at for part in parts)

    def at(self, layer: int, part: str, x: Tensor) -> Tensor:
        for group in self._at.get((layer, part), ()):
            x = group.apply(x)
        return x


def tapped_stream(model: Decoder, token_ids: Tensor, step: Step, taps: TensorTaps) -> Tensor:
    """The residual stream after the last block, (T, D)."""
    x, delta = _embedded(model, token_ids, step, taps), None
    for layer, block in enumerate(model.layers):
        assert isinstance(block, Block | HalfBlock)
        if delta is not None and taps.has(layer, "resid_pre"):
            x, delta = x + delta, None
        x = taps.at(layer, "resid_pre", x)
        if taps.has_inside(layer):
            x = _block(model, block, x if delta is None else x + delta, step, taps, layer)
            delta = None
        else:
            x, delta = block.parts(x, delta, step)
        if delta is not None and taps.has(layer, "resid_post"):
            x, delta = x + delta, None
        x = taps.at(layer, "resid_post", x)
    return x if delta is None else x + delta


def tapped_norm(model: Decoder, x: Tensor, taps: TensorTaps) -> Tensor:
    """The final norm of the residual stream of all tokens."""
    return taps.at(-1, "normalized", model.norm(x))


def tapped_logits(
    model: Decoder, x: Tensor, taps: TensorTaps, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The residual stream of the tokens `rows` (R, D), and their logits (R, V) in the model's
    dtype. None: of all tokens.
    """
    if not taps.has(-1, "normalized"):
        x = x if rows is None else x.index_select(0, rows)
        return x, model.stream_logits(x)
    normed = tapped_norm(model, x, taps)
    if rows is not None:
        x, normed = x.index_select(0, rows), normed.index_select(0, rows)
    return x, model.finished(model.head(normed))


def _embedded(model: Decoder, token_ids: Tensor, step: Step, taps: TensorTaps) -> Tensor:
    if not isinstance(model, GPT2):
        return taps.at(-1, "embed", model.embed_tokens(token_ids, step))
    x = taps.at(-1, "embed", Decoder.embed_tokens(model, token_ids, step))
    return x + model.position(step.positions)


def _block(
    model: Decoder, block: Block | HalfBlock, x: Tensor, step: Step, taps: TensorTaps, layer: int
) -> Tensor:
    if isinstance(block, HalfBlock):
        return _half(model, block, x, step, taps, layer)
    read = block._attention_input(x)
    out = _attention(model, block, read, step, taps, layer)
    if isinstance(block, OutputNormBlock):
        out = block.attn_norm(out)
    elif isinstance(block, BothNormBlock):
        out = block.attn_out_norm(out)
    after = x + block._scaled(taps.at(layer, "attn_out", out))
    if isinstance(block, ParallelBlock):
        read = read if block.mlp_norm is None else block.mlp_norm(x)
    else:
        after = taps.at(layer, "resid_mid", after)
        assert isinstance(block, InputNormBlock | OutputNormBlock | BothNormBlock)
        read = after if isinstance(block, OutputNormBlock) else block.mlp_norm(after)
    fed = block.feed(read) if block.mlp is None else _mlp(block.mlp, read, taps, layer)
    if isinstance(block, OutputNormBlock):
        fed = block.mlp_norm(fed)
    elif isinstance(block, BothNormBlock):
        fed = block.mlp_out_norm(fed)
    return after + block._scaled(taps.at(layer, "mlp_out", fed))


def _half(
    model: Decoder, block: HalfBlock, x: Tensor, step: Step, taps: TensorTaps, layer: int
) -> Tensor:
    if block.kind == "none":
        fed = _mlp(block.mlp, block.mlp_norm(x), taps, layer)
        return x + taps.at(layer, "mlp_out", fed) * block.multiplier
    read = block.attn_norm(x)
    out = _attention(model, block, read, step, taps, layer)
    return x + taps.at(layer, "attn_out", out) * block.multiplier


def _attention(
    model: Decoder, block: Block | HalfBlock, read: Tensor, step: Step, taps: TensorTaps, layer: int
) -> Tensor:
    attn = block.attn if hasattr(block, "attn") else block.mixer
    if not isinstance(attn, Attention):
        return attn(read, step)
    qkv = attn.qkv(read)
    if taps.has(layer, "q", "k", "v"):
        keys = attn.num_kv_heads * attn.head_dim
        parts = qkv.split((attn.num_heads * attn.head_dim, keys, keys), dim=-1)
        made = (taps.at(layer, name, part) for name, part in zip("qkv", parts, strict=True))
        qkv = torch.cat(tuple(made), dim=-1)
    qkv = attn._normed(qkv)
    if taps.has(layer, "rot_q", "rot_k"):
        q, k, _ = attn.heads(qkv, model.rotations(step.positions.long())[layer])
        taps.at(layer, "rot_q", q.flatten(1))
        taps.at(layer, "rot_k", k.flatten(1))
    attended = taps.at(layer, "z", step.attend(attn, qkv).flatten(1))
    if attn.gate is not None:
        attended = attended * torch.sigmoid(attn.gate(read))
    return attn.o(attended)


def _mlp(mlp: GatedMLP | MLP, x: Tensor, taps: TensorTaps, layer: int) -> Tensor:
    if not taps.has(layer, "mlp_pre"):
        return mlp.down(taps.at(layer, "mlp_post", mlp.activated(x)))
    if isinstance(mlp, MLP):
        inner = activate(taps.at(layer, "mlp_pre", mlp.up(x)), mlp.activation)
    else:
        gate, up = mlp.gate_up(x).chunk(2, dim=-1)
        gate = taps.at(layer, "mlp_pre", gate.contiguous())
        inner = gated(torch.cat((gate, up), dim=-1), mlp.activation)
    return mlp.down(taps.at(layer, "mlp_post", inner))


def input_x_gradient(
    model: Decoder, token_ids: Tensor, sites: tuple[Site, ...], target: int | None, position: int
) -> tuple[int, Tensor]:
    """The target and, for each token up to `position`, its embedding times the gradient of the
    target's logit there, (T,). No target: the likeliest token. A pass without the paged cache.
    """
    ids = token_ids[: position + 1]
    delta = torch.zeros(
        (len(ids), model.config.hidden_size + EXTRA_COLUMNS),
        dtype=model.norm.weight.dtype,
        device=ids.device,
        requires_grad=True,
    )
    shape = GroupShape(0, ADD, len(ids))
    ones = torch.ones((len(ids), 1), dtype=delta.dtype, device=ids.device)
    places = torch.arange(len(ids), device=ids.device)
    taps = TensorTaps([TensorGroup(shape, places, ones, delta, delta[:0], delta[:0])], sites)
    step = model.sequence_step(ids)
    logits = model.logits(tapped_stream(model, ids, step, taps)[-1:])[0]
    chosen = int(logits.detach().argmax()) if target is None else target
    (gradient,) = torch.autograd.grad(logits[chosen], delta)
    embeds = Decoder.embed_tokens(model, ids, step)
    return chosen, (gradient[:, : embeds.shape[1]] * embeds).sum(1).float().detach()
