"""What every API of chats holds against the model that is to answer, in the same words: whether it
can at all, what its template is told, and what can't be done as asked.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from engine.core.interfaces.backend import GrammarSpec, ModelCard
from engine.servers.serving.services import Services

NO_TEXT = "writes no text; use /v1/embeddings"
# Passed on as high. A template that knows more can be told by chat_template_kwargs.
_ABOVE_HIGH = ("xhigh", "max")


def require_chat(services: Services, card: ModelCard, param: str) -> None:
    services.require(card, "completions", param, NO_TEXT)
    services.require(card, "chat", param, "has no chat template; use /v1/completions")


def require_grammar(services: Services, card: ModelCard, grammar: GrammarSpec | None) -> None:
    if grammar is not None:
        what = "can't be held to a grammar by its backend"
        services.require(card, "json_schema", grammar.param, what)


def check_tools(
    services: Services, request: Request, card: ModelCard, tools: Sequence[Mapping[str, Any]]
) -> None:
    if not tools:
        return
    services.require(card, "tools", "tools", "can't call tools")
    if "tools" in card.emulated:
        services.warn(request, "tools", "emulated with a prompt, the model was not made for them")


def warn_of_cache_key(services: Services, request: Request, key: str | None) -> None:
    """It is to raise the number of cached tokens; as a salt it would lower it."""
    if key is not None:
        services.warn(request, "prompt_cache_key", "is not needed, every prefix is cached")


def known_options(
    services: Services, request: Request, card: ModelCard, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Only what the model's template looks at; a warning for everything else."""
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in card.template_options:
            options[name] = value
        else:
            place = f"chat_template_kwargs.{name[:64]}"
            services.warn(request, place, "has no effect on this model's template")
    return options


def effort_options(
    services: Services, request: Request, card: ModelCard, effort: str | None, param: str
) -> dict[str, Any]:
    """Template options for an effort; what the model's template can't do is warned about."""
    if effort is None:
        return {}
    if "reasoning_effort" in card.template_options:
        if effort in _ABOVE_HIGH:
            services.warn(request, param, f"{effort} was lowered to high")
            effort = "high"
        return {"reasoning_effort": effort}
    if effort in ("none", "minimal") and "enable_thinking" in card.template_options:
        return {"enable_thinking": False}
    if effort != "none" or "reasoning" in card.capabilities:
        services.warn(request, param, f"{effort} can't be set for this model")
    return {}
