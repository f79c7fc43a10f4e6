"""How much a model is to reason, in the words that clients have for it."""

from typing import Any

from starlette.requests import Request

from engine.core.interfaces.backend import ModelCard
from engine.servers.services import Services


def effort_options(
    services: Services, request: Request, card: ModelCard, effort: str | None, param: str
) -> dict[str, Any]:
    """Template options for an effort; what the model's template can't do is warned about."""
    if effort is None:
        return {}
    if "reasoning_effort" in card.template_options:
        return {"reasoning_effort": effort}
    if effort in ("none", "minimal") and "enable_thinking" in card.template_options:
        return {"enable_thinking": False}
    if effort != "none" or "reasoning" in card.capabilities:
        services.warn(request, param, f"{effort} can't be set for this model")
    return {}
