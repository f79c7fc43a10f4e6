"""The places inside a decoder that interpretability requests can read and change. They have the
names of TransformerLens, and are the same in all frameworks.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

from engine.architectures.base import ModelConfig

# The parts of a layer, in the order in which a step computes them, and their names after
# "blocks.N.". The outputs of attention and MLP are taken before the residual multiplier.
LAYER_PARTS = {
    "resid_pre": "hook_resid_pre",
    "q": "attn.hook_q",  # queries, keys and values are taken before their norms and RoPE
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "rot_q": "attn.hook_rot_q",  # after their norms and RoPE
    "rot_k": "attn.hook_rot_k",
    "z": "attn.hook_z",
    "attn_out": "hook_attn_out",
    "resid_mid": "hook_resid_mid",
    "mlp_pre": "mlp.hook_pre",  # in a gated MLP: the gate
    "mlp_post": "mlp.hook_post",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
}
EMBED, NORMALIZED = "hook_embed", "ln_final.hook_normalized"
PATTERN = "attn.hook_pattern"  # computed from rot_q and rot_k; it can't be edited
# Parts that are only read: attention uses the copies in the KV cache.
READ_ONLY = ("rot_q", "rot_k")
# The parts of the last layer that are computed only for tokens whose logits are needed.
_LATE = ("attn_out", "resid_mid", "mlp_pre", "mlp_post", "mlp_out", "resid_post")


@dataclass(frozen=True, slots=True)
class Site:
    """A value that a step computes for each token. `layer` is -1 outside of the layers."""

    name: str
    part: str
    layer: int
    shape: tuple[int, ...]  # of one token
    # Whether it is computed only for tokens whose logits are needed
    is_late: bool = False

    @property
    def width(self) -> int:
        return prod(self.shape)

    @property
    def can_edit(self) -> bool:
        return self.part not in READ_ONLY


def site_name(layer: int, part: str) -> str:
    return f"blocks.{layer}.{LAYER_PARTS[part]}"


def sites_of(config: ModelConfig) -> tuple[Site, ...]:
    """All sites of a decoder, in the order in which a step computes them."""
    if config.encoder is not None:
        return ()
    sites = [Site(EMBED, "embed", -1, (config.hidden_size,))]
    for layer in range(config.num_layers):
        is_last = layer == config.num_layers - 1
        sites += [
            Site(site_name(layer, part), part, layer, shape, is_last and part in _LATE)
            for part, shape in _layer_shapes(config, layer).items()
        ]
    return (*sites, Site(NORMALIZED, "normalized", -1, (config.hidden_size,), True))


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    kind, stream = config.layer(layer), (config.hidden_size,)
    heads, kv_heads = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
    found: dict[str, tuple[int, ...]] = {"resid_pre": stream}
    if kind.mixer == "attention" and config.latent is None:
        found |= {"q": heads, "k": kv_heads, "v": kv_heads, "rot_q": heads, "rot_k": kv_heads}
        found |= {"z": heads}
    if kind.mixer != "none":
        found["attn_out"] = stream
    if kind.mixer != "none" and kind.mlp and config.parallel is None:
        found["resid_mid"] = stream
    if kind.mlp and not kind.experts:
        inner = (config.intermediate_size,)
        found |= {"mlp_pre": inner, "mlp_post": inner, "mlp_out": stream}
    return found | {"resid_post": stream}


def site_list(config: ModelConfig) -> list[dict[str, Any]]:
    """The sites as clients see them. Attention patterns are read by `attention`."""
    found: list[dict[str, Any]] = []
    for site in sites_of(config):
        found.append({"name": site.name, "shape": site.shape, "edit": site.can_edit})
        if site.part == "rot_k":
            name = f"blocks.{site.layer}.{PATTERN}"
            shape = (config.num_heads, "positions")
            found.append({"name": name, "shape": shape, "edit": False, "read_by": "attention"})
    return found
