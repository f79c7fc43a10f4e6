"""Lists all groups of conformance rules, in the order in which they run."""

from importlib import import_module

from engine_tools.conformance.rule import Group

_GROUPS = (
    "errors:ERRORS",
    "models:MODELS",
    "chat:CHAT_GROUP",
    "streaming:STREAMING",
    "parameters:PARAMETERS",
    "tools:TOOLS",
    "structured:STRUCTURED",
    "completions:COMPLETIONS_GROUP",
    "embeddings:EMBEDDINGS",
    "rerank:RERANK",
    "responses:RESPONSES",
    "messages:MESSAGES",
    "clients:CLIENTS",
    "files:FILES",
    "files:BATCHES",
    "robustness:ROBUSTNESS",
)


def _group(target: str) -> Group:
    module, _, name = target.partition(":")
    group: Group = getattr(import_module(f"{__name__}.{module}"), name)
    return group


GROUPS: tuple[Group, ...] = tuple(map(_group, _GROUPS))
