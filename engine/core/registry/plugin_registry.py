"""Plugins by name: the values of `[plugins.NAME]`.

A package adds one with an entry point in the group `engine.plugins` whose value is its
`InferencePlugin` class, as "module:ClassName".
"""

from typing import Any

from engine.core.registry.registry import Registry

_PLUGINS = Registry(
    kind="plugin",
    builtin={
        "pii_redactor": "engine.plugins.pii:PiiRedactor",
        "audit_log": "engine.plugins.audit_log:RequestAudit",
    },
    group="engine.plugins",
)


def plugin_names() -> tuple[str, ...]:
    return _PLUGINS.names()


def plugin_class(name: str) -> Any:
    return _PLUGINS.load(name)
