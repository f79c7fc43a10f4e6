"""Where the sites of a model are in its execution plan."""

from typing import Any

import msgspec

from engine.architectures.base import ModelConfig
from engine.architectures.sites import Site, sites_of
from engine.ir.plan import (
    AttentionStep,
    EmbedStep,
    ExecutionPlan,
    LinearStep,
    NormStep,
    RopeWriteStep,
    Step,
)

# The points of a plan step. The index of each name is its code in csrc/executor/taps.h.
POINTS = ("before", "after", "result", "normed", "pre_activation")


class SitePoint(msgspec.Struct, frozen=True):
    """A point of a plan step, and the first column of the buffer there."""

    step: int
    point: str
    column: int = 0


def add_sites(model: Any, config: ModelConfig, plan: ExecutionPlan) -> tuple[Site, ...]:
    """Passes the places of all sites to the C++ executor, and returns the sites. Sites are left out
    if the plan never stores their values.
    """
    places = _places(config, plan)
    found = tuple(site for site in sites_of(config) if (site.layer, site.part) in places)
    rows = []
    for site in found:
        place = places[site.layer, site.part]
        rows.append((place.step, POINTS.index(place.point), place.column, site.width))
    model.set_sites(rows)
    return found


def _places(config: ModelConfig, plan: ExecutionPlan) -> dict[tuple[int, str], SitePoint]:
    places: dict[tuple[int, str], SitePoint] = {}
    for index, step in enumerate(plan.steps):
        for layer in _layers(step):
            places.setdefault((layer, "resid_pre"), SitePoint(index, "before"))
            places |= {(layer, part): place for part, place in _of_layer(step, index, layer)}
        if isinstance(step, EmbedStep):
            places[-1, "embed"] = SitePoint(index, "after" if step.positions is None else "result")
        if isinstance(step, LinearStep) and "norm" in step.nodes:
            places[-1, "normalized"] = SitePoint(index, "normed")
    for layer in range(config.num_layers):  # a layer without an MLP ends with attention
        if (place := places.get((layer, "resid_mid"))) is not None:
            places.setdefault((layer, "resid_post"), place)
    return places


def _layers(step: Step) -> set[int]:
    return {int(name.split(".")[1]) for name in step.nodes if name.startswith("layers.")}


def _of_layer(step: Step, index: int, layer: int) -> list[tuple[str, SitePoint]]:
    """The parts of a layer that a plan step reads or makes."""
    name = f"layers.{layer}"
    if isinstance(step, RopeWriteStep):
        q, kv = step.heads * step.head_dim, step.kv_heads * step.head_dim
        columns = {"q": 0, "k": q, "v": q + kv}
        read = [(part, SitePoint(index, "before", column)) for part, column in columns.items()]
        rotated = [(f"rot_{part}", SitePoint(index, "after", columns[part])) for part in "qk"]
        return read + rotated
    if isinstance(step, AttentionStep):
        return [("z", SitePoint(index, "after"))]
    for half, total in (("attn", "resid_mid"), ("mlp", "resid_post")):
        if f"{name}.{half}_sum" in step.nodes:
            found = [(total, SitePoint(index, "after"))]
            if isinstance(step, LinearStep | NormStep) and step.residual:
                found.append((f"{half}_out", SitePoint(index, "result")))
            return found
    if isinstance(step, LinearStep) and f"{name}.mlp.activation" in step.nodes:
        found = [("mlp_post", SitePoint(index, "after"))]
        if not step.multiply:
            found.append(("mlp_pre", SitePoint(index, "pre_activation")))
        return found
    return []
