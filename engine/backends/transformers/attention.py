"""Attention over the paged KV cache for any Transformers model whose attention can be replaced.

We register a function as an attention implementation of Transformers. The model calls it with the
queries, keys and values of each layer. The step (`AttentionStep`) is passed to it as a keyword
argument of the forward pass. The tokens of all sequences are concatenated to one batch row. Only
the attention knows which tokens belong to which sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.torch.execution.cache import PagedCache
from engine.torch.kernels.attention import AttentionPlan

NAME = "engine_paged"
# Keyword arguments that models pass to attention functions, but that don't change the result.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "cache_position"}
)


@dataclass(frozen=True, slots=True)
class ScoreParameters:
    """Parameters of a layer's attention scores."""

    scale: float | None  # None: 1 / sqrt(head size)
    window: int | None


class AttentionStep(Protocol):
    """One forward pass, as the attention of its layers sees it."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scoring: ScoreParameters,
        others: frozenset[str],
    ) -> Tensor:
        """Attention of one layer. q (T, N, H), k (T, K, H) and v (T, K, G) are those of the step's
        tokens. Returns (T, N, G). `others` has the names of arguments that are not supported.
        """
        ...


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged_step: AttentionStep,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that is registered in Transformers. query (1, N, T, H), key
    (1, K, T, H), value (1, K, T, G).
    """
    others = {name for name, given in kwargs.items() if given is not None and given is not False}
    if attention_mask is not None:
        others.add("attention_mask")
    if is_causal is False or not getattr(module, "is_causal", True):
        others.add("is_causal")
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    scoring = ScoreParameters(scaling, sliding_window)
    out = paged_step.attend(layer, q, k, v, scoring, frozenset(others - _WITHOUT_EFFECT))
    return out[None], None


AttentionInterface.register(NAME, attend)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    num_kv_heads: int
    head_dim: int  # head size of keys
    value_dim: int
    scoring: ScoreParameters
    others: frozenset[str]


@dataclass(slots=True)
class Recording:
    """A step over one whole sequence. It records the parameters of each layer's attention."""

    calls: list[tuple[int, LayerFacts]] = field(default_factory=list)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scoring: ScoreParameters,
        others: frozenset[str],
    ) -> Tensor:
        facts = LayerFacts(k.shape[1], k.shape[2], v.shape[2], scoring, others)
        self.calls.append((layer, facts))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scoring.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step over tokens of several sequences, with the paged KV cache."""

    write_slots: Tensor  # (T,) int64
    # Makes the plan for a scoring and a number of heads.
    plan: Callable[[ScoreParameters, int], AttentionPlan]
    cache: PagedCache
    plans: dict[ScoreParameters, AttentionPlan] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scoring: ScoreParameters,
        others: frozenset[str],
    ) -> Tensor:
        plan = self.plans.get(scoring)
        if plan is None:
            plan = self.plans[scoring] = self.plan(scoring, q.shape[1])
        value_dim, narrower = v.shape[2], k.shape[2] - v.shape[2]
        # Pad values that are smaller than keys. The cache has the same head size for both.
        if narrower:
            v = F.pad(v, (0, narrower))
        self.cache.write(layer, self.write_slots, k, v)
        cached = self.cache.layers[layer]
        out = plan.attend(q.contiguous(), k, v, cached, window=scoring.window)
        return out[..., :value_dim]


@torch.inference_mode()
def record(model: Any, token_ids: Tensor) -> Recording:
    """Record the attention parameters of all layers for one sequence (T,). The model must already
    use this module's attention.
    """
    recording = Recording()
    positions = torch.arange(len(token_ids), device=token_ids.device)
    model(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        paged_step=recording,
    )
    return recording
