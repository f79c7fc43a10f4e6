"""Attribution: what each part of the model (direct logit attribution), or each token of the input
(input x gradient), adds to the logit of a token.

The residual stream is the sum of the embedding and of all outputs of attention and MLP. The final
norm is linear once its scale is known, so each part has its share of the logit.
"""

from collections.abc import Sequence as Listed
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.architectures.sites import EMBED, site_name
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.interp import Attribution, Span
from engine.runtime.interp.probe import Probe
from engine.runtime.interp.taps import Tappable
from engine.runtime.model_runner import F32
from engine.runtime.sequence import Sequence

OUTSIDE = "interp.attribution.position is not a position of the sequence."


@runtime_checkable
class GradientRunner(Protocol):
    """A runner that computes gradients, in a pass of its own."""

    def input_attribution(
        self, token_ids: Listed[int], target: int | None, position: int
    ) -> tuple[int, F32]:
        """The target, and each token's embedding times the gradient of the target's logit at
        `position`. No target: the likeliest token. Edits have no effect on it.
        """
        ...


def attribution_of(
    seq: Sequence, probe: Probe, attribution: Attribution, runner: Tappable, count: int
) -> dict[str, Any]:
    if attribution.method == "direct":
        return direct_attribution(probe, attribution, runner, count)
    if not isinstance(runner, GradientRunner):
        raise InvalidRequestError(
            "interp.attribution: gradients need --backend torch or jax; method direct works here.",
            param="interp",
        )
    place = attribution.position + (seq.num_prompt if attribution.position < 0 else 0)
    if not 0 <= place < count:
        raise InvalidRequestError(OUTSIDE, param="interp")
    target, shares = runner.input_attribution(probe.token_ids, attribution.target, place)
    return {
        "method": attribution.method,
        "target": target,
        "position": attribution.position,
        "shares": {str(index): share for index, share in enumerate(shares.tolist())},
    }


def direct_attribution(
    probe: Probe, attribution: Attribution, runner: Tappable, count: int
) -> dict[str, Any]:
    config, span = runner.config, Span((attribution.position,))
    if any(config.layer(layer).experts for layer in range(config.num_layers)):
        raise InvalidRequestError(
            "interp.attribution: models with experts are not covered.", param="interp"
        )

    def value(name: str) -> NDArray[np.float64]:
        places, rows = probe.values(name, span, count)
        if not places:
            raise InvalidRequestError(OUTSIDE, param="interp")
        found: NDArray[np.float64] = rows[0].astype(np.float64)
        return found

    final = value(site_name(config.num_layers - 1, "resid_post"))
    target = attribution.target
    if target is None:
        target = int(runner.unembed(final[None].astype(np.float32))[0].argmax())
    direction = runner.head_row(target).astype(np.float64)
    if config.norm == "layer":
        direction -= direction.mean()
        final = final - final.mean()
    scale = 1 / np.sqrt(np.square(final).mean() + config.norm_eps)
    parts = {EMBED: value(EMBED)}
    if config.learned_positions:
        parts["hook_pos_embed"] = value(site_name(0, "resid_pre")) - value(EMBED)
    for site in probe.sites:
        if site.part in ("attn_out", "mlp_out"):
            parts[site.name] = value(site.name) * config.residual_multiplier
    shares = {name: float(part @ direction * scale) for name, part in parts.items()}
    return {
        "method": "direct",
        "target": target,
        "position": attribution.position,
        "shares": shares,
        "total": sum(shares.values()),
    }
